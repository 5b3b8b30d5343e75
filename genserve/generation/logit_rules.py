"""Logit rules: what one request changes of the logits of its token sequence, by the tokens it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from genserve.generation.logit_edits import Entries, LogitEdits
from genserve.sampling_params import SamplingParams

__all__ = ["LogitRules", "logit_rules"]


class LogitRules:
    """The rules of one token sequence. Reads each of its tokens once; belongs to the engine's thread."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        num_prompt_tokens: int,
        ending_ids: frozenset[int],
        bad_words: Sequence[Sequence[int]],
    ) -> None:
        """Begin before the first token.

        Args:
            params: of the request.
            num_prompt_tokens: what follows them is the answer.
            ending_ids: of the tokens that end the answer.
            bad_words: `params.bad_words` as token ids, in each way in which one can be written.
        """
        self._num_prompt_tokens = num_prompt_tokens
        self._min_length = num_prompt_tokens + params.min_tokens
        self._ending_ids = tuple(ending_ids)
        self._suppressed = params.suppress_tokens
        self._bad_words = [tuple(word) for word in bad_words]
        self._allowed = np.array(params.allowed_token_ids, dtype=np.int64)
        self._biased = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._ngram_size = params.no_repeat_ngram_size
        self._penalizes = bool(self._repetition != 1 or self._frequency or self._presence)
        self._num_read = 0
        self._counts: dict[int, int] = {}       # of all tokens: how often the answer has them
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)

    def edits(self, token_ids: Sequence[int], *, row: int) -> LogitEdits:
        """Return what is to be changed of the logits after these tokens, which lie in row `row`."""
        self._read(token_ids)
        seen = np.fromiter(self._counts, dtype=np.int64)
        counts = np.fromiter(self._counts.values(), dtype=np.float32)
        generated = counts > 0
        repeated = seen if self._repetition != 1 else seen[:0]
        lowered = seen[generated] if self._frequency or self._presence else seen[:0]
        return LogitEdits(
            allowed=Entries.of(self._allowed, row=row),
            biased=Entries.of(self._biased, self._bias, row=row),
            repeated=Entries.of(repeated, self._repetition, row=row),
            lowered=Entries.of(
                lowered, self._frequency * counts[generated][: lowered.size] + self._presence, row=row
            ),
            banned=Entries.of(self._banned(token_ids), row=row),
        )

    def _read(self, token_ids: Sequence[int]) -> None:
        for position in range(self._num_read, len(token_ids)):
            token_id = token_ids[position]
            if self._penalizes:
                generated = position >= self._num_prompt_tokens
                self._counts[token_id] = self._counts.get(token_id, 0) + generated
            first = position + 1 - self._ngram_size
            if self._ngram_size and first >= 0:
                self._followers[tuple(token_ids[first:position])].add(token_id)
        self._num_read = len(token_ids)

    def _banned(self, token_ids: Sequence[int]) -> Iterator[int]:
        length = len(token_ids)
        yield from self._suppressed
        if length < self._min_length:
            yield from self._ending_ids
        if self._ngram_size and length + 1 >= self._ngram_size:
            yield from self._followers.get(tuple(token_ids[length + 1 - self._ngram_size :]), ())
        for *begun, last in self._bad_words:
            if list(token_ids[max(0, length - len(begun)) :]) == begun:
                yield last


def logit_rules(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    ending_ids: frozenset[int],
    bad_words: Sequence[Sequence[int]],
) -> LogitRules | None:
    """Return the rules of a request, None if it changes no logit. Arguments are those of `LogitRules`."""
    changes = (
        params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
        or params.no_repeat_ngram_size
        or params.logit_bias
        or params.allowed_token_ids
        or params.suppress_tokens
        or params.min_tokens
        or bad_words
    )
    if not changes:
        return None
    return LogitRules(
        params, num_prompt_tokens=num_prompt_tokens, ending_ids=ending_ids, bad_words=bad_words
    )
