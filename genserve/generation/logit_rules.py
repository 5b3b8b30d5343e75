"""Logit rules: what one request changes of the logits of its token sequence, by the tokens it has."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from genserve.generation.logit_edits import Entries, LogitEdits
from genserve.generation.logits_model import FloatArray, TokenArray
from genserve.generation.plugins import SequencePlugins
from genserve.generation.repetition import NO_BREAKERS, Breakers, Repetition
from genserve.sampling.params import SamplingParams

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
        dry_breakers: Breakers = NO_BREAKERS,
        plugins: SequencePlugins,
    ) -> None:
        """Begin before the first token.

        Args:
            params: of the request.
            num_prompt_tokens: what follows them is the answer.
            ending_ids: of the tokens that end the answer.
            bad_words: `params.bad_words` as token ids, in each way in which one can be written.
            dry_breakers: `params.dry_sequence_breakers`.
            plugins: of the sequence.
        """
        self._plugins = plugins
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
        self._window = params.penalty_window
        repeats = params.dry_multiplier and params.dry_penalty_last_n
        self._repetition_ahead = Repetition(params, breakers=dry_breakers) if repeats else None
        self._num_read = 0
        self._num_forgotten = 0
        self._seen: Counter[int] = Counter()        # how often a token is there
        self._seen_ids: TokenArray = np.empty(0, dtype=np.int64)
        self._generated: Counter[int] = Counter()   # how often the answer has it
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)

    def edits(self, token_ids: Sequence[int], *, row: int) -> LogitEdits:
        """Return what is to be changed of the logits after these tokens, which lie in row `row`."""
        self._read(token_ids)
        lowered, amounts = self._lowered(token_ids)
        return LogitEdits(
            before=self._plugins.edits("pre", token_ids, row=row),
            allowed=Entries.of(self._allowed, row=row),
            biased=Entries.of(self._biased, self._bias, row=row),
            repeated=Entries.of(self._repeated(), self._repetition, row=row),
            lowered=Entries.of(lowered, amounts, row=row),
            banned=Entries.of(self._banned(token_ids), row=row),
            after=self._plugins.edits("post_penalty", token_ids, row=row),
        )

    def _read(self, token_ids: Sequence[int]) -> None:
        read, length = self._num_read, len(token_ids)
        self._count(token_ids, read, length, Counter.update)
        if self._window and length - self._window > self._num_forgotten:
            self._count(token_ids, self._num_forgotten, length - self._window, _forget)
            self._num_forgotten = length - self._window
        for position in range(read, length) if self._ngram_size else ():
            first = position + 1 - self._ngram_size
            if first >= 0:
                self._followers[tuple(token_ids[first:position])].add(token_ids[position])
        self._num_read = length

    def _count(
        self,
        token_ids: Sequence[int],
        first: int,
        last: int,
        change: Callable[[Counter[int], Sequence[int]], None],
    ) -> None:
        if self._repetition != 1:
            change(self._seen, token_ids[first:last])
        if self._frequency or self._presence:
            change(self._generated, token_ids[max(first, self._num_prompt_tokens) : last])

    def _repeated(self) -> TokenArray:
        # A long prompt has most tokens already: it seldom grows by one. A window may lose one as it does.
        if self._window or len(self._seen) != self._seen_ids.size:
            self._seen_ids = np.fromiter(self._seen, dtype=np.int64)
        return self._seen_ids

    def _lowered(self, token_ids: Sequence[int]) -> tuple[TokenArray, FloatArray]:
        """Return the tokens from whose logits something is taken, and how much."""
        generated = np.fromiter(self._generated, dtype=np.int64)
        counts = np.fromiter(self._generated.values(), dtype=np.float32)
        amounts = self._frequency * counts + self._presence
        if self._repetition_ahead is None:
            return generated, amounts
        repeated, penalties = self._repetition_ahead.penalties(token_ids)
        both, place = np.unique(np.concatenate([generated, repeated]), return_inverse=True)
        summed = np.bincount(place, weights=np.concatenate([amounts, penalties]), minlength=both.size)
        return both, summed.astype(np.float32)

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


def _forget(counts: Counter[int], token_ids: Sequence[int]) -> None:
    counts.subtract(token_ids)
    for token_id in set(token_ids):
        if not counts[token_id]:
            del counts[token_id]


def logit_rules(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    ending_ids: frozenset[int],
    bad_words: Sequence[Sequence[int]],
    dry_breakers: Breakers = NO_BREAKERS,
    plugins: SequencePlugins,
) -> LogitRules | None:
    """Return the rules of a request, None if it changes no logit. Arguments are those of `LogitRules`."""
    changes = (
        params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
        or (params.dry_multiplier and params.dry_penalty_last_n)
        or params.no_repeat_ngram_size
        or params.logit_bias
        or params.allowed_token_ids
        or params.suppress_tokens
        or params.min_tokens
        or bad_words
        or plugins.processes
    )
    if not changes:
        return None
    return LogitRules(
        params,
        num_prompt_tokens=num_prompt_tokens,
        ending_ids=ending_ids,
        bad_words=bad_words,
        dry_breakers=dry_breakers,
        plugins=plugins,
    )
