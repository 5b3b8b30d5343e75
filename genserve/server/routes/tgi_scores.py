"""TGI scores: the tokens of a prompt, and the likeliest ones beside those of an answer, in TGI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genserve.request import Delta, TokenLogprob
from genserve.text.tokenizer import Tokenizer

__all__ = ["LikelyTokens", "prefill"]


class LikelyTokens:
    """Reads the deltas of one answer, in their order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = tokenizer.eos_token_ids
        self._text = tokenizer.detokenizer()

    def read(self, delta: Delta) -> list[list[dict[str, Any]]]:
        """Return the likeliest tokens in the place of each token of a delta, the best first."""
        likely = []
        for token_id, top in zip(delta.token_ids, delta.top_logprobs, strict=True):
            likely.append(
                [
                    {"id": i, "text": self._text.peek(i), "logprob": level, "special": i in self._special}
                    for i, level in top
                ]
            )
            self._text.push(token_id)
        return likely


def prefill(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], scores: Sequence[TokenLogprob]
) -> list[dict[str, Any]]:
    """Return the tokens of a prompt; `scores` are of all but the first, since nothing is before that."""
    text = tokenizer.detokenizer()
    levels = [None, *(score.logprob for score in scores)]
    return [
        {"id": token_id, "text": text.push(token_id), "logprob": level}
        for token_id, level in zip(prompt_ids, levels, strict=True)
    ]
