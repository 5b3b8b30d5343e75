"""Prompt logprobs: how likely the tokens of a prompt were, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genserve.request import TokenLogprob
from genserve.text.tokenizer import Tokenizer

__all__ = ["prompt_logprobs"]


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], scores: Sequence[TokenLogprob]
) -> list[dict[str, Any] | None]:
    """Return an object for each token of a prompt, by token id; None for the first, as nothing is before it.

    Args:
        tokenizer: of the model.
        prompt_ids: at least one.
        scores: of all of them but the first.
    """
    text = tokenizer.detokenizer()
    entries: list[dict[str, Any] | None] = [None]
    for before, token_id, score in zip(prompt_ids, prompt_ids[1:], scores, strict=False):
        text.push(before)
        ranks = {other: rank for rank, (other, _) in enumerate(score.top, start=1)}
        levels = {token_id: score.logprob, **dict(score.top)}
        entries.append(
            {
                # The rank of a token that is not among the most likely is not known.
                str(i): {"logprob": level, "rank": ranks.get(i), "decoded_token": text.peek(i)}
                for i, level in levels.items()
            }
        )
    return entries
