"""Legacy logprobs: the log-probabilities of a completion in the shape of `/v1/completions`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from genserve.request import Completion, Delta, TopTokens
from genserve.text.tokenizer import Tokenizer

__all__ = ["LegacyLogprobs"]


class _Entry(NamedTuple):
    """One token."""

    text: str
    logprob: float | None               # None: nothing came before it, or nobody knows
    top: dict[str, float] | None        # by text, the token that is there among them


class LegacyLogprobs:
    """The `logprobs` of one choice in this route's shape, as its tokens come.

    The text of a token is what it adds to the text before it: a token that ends in the middle of a
    character leaves that to the next one, and one that ends the text adds nothing. Of the most likely
    tokens, one whose text another has too, or none, is called `token_id:` and its id, as vLLM does.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        """Begin.

        Args:
            tokenizer: of the model.
            prompt_ids: what is echoed.
        """
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._prompt_ids = prompt_ids
        self._offset = 0

    def part(self, part: Delta | Completion) -> dict[str, Any]:
        """Return the log-probabilities of a part, or of the whole, behind those of what is echoed."""
        entries: list[_Entry] = []
        if self._prompt_ids:
            scores = [(score.logprob, score.top) for score in part.prompt_logprobs]
            entries += self._entries(self._prompt_ids, [(None, ()), *scores], final=True)
            self._prompt_ids, self._detokenizer = (), self._tokenizer.detokenizer()
        tops = part.top_logprobs or ((),) * len(part.token_ids)
        scores = list(zip(part.logprobs, tops, strict=True))
        entries += self._entries(part.token_ids, scores, final=part.finish_reason is not None)
        *offsets, self._offset = accumulate((len(entry.text) for entry in entries), initial=self._offset)
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [entry.top for entry in entries],
            "text_offset": offsets,
        }

    def _entries(
        self, token_ids: Sequence[int], scores: Sequence[tuple[float | None, TopTokens]], *, final: bool
    ) -> Iterator[_Entry]:
        """Yield text, log-probability and the most likely tokens, the one that is there among them."""
        for index, (token_id, (logprob, top)) in enumerate(zip(token_ids, scores, strict=True)):
            others = [(self._detokenizer.peek(i), i, level) for i, level in top if i != token_id]
            text = self._detokenizer.push(token_id)
            if final and index == len(token_ids) - 1:
                text += self._detokenizer.flush()
            # JSON has no NaN: a decoding loop that picks for itself leaves no probability.
            if logprob is None or math.isnan(logprob):
                yield _Entry(text, None, None)
            else:
                named = {text: logprob}
                for other, other_id, level in others:
                    named[other if other and other not in named else f"token_id:{other_id}"] = level
                yield _Entry(text, logprob, named)
