"""Scored tokens: log-probabilities of tokens as replies write them, and ids as vLLM's extras do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from genserve.request import TokenLogprob

__all__ = ["read_logprob", "read_prompt_logprobs", "token_id_of"]

_PREFIX = "token_id:"


def token_id_of(name: str) -> int:
    """Return the id in a name that `return_tokens_as_token_ids` makes; raises ValueError."""
    return int(name.removeprefix(_PREFIX))


def read_logprob(value: float | None) -> float:
    """Read one; null stands for that of a token that a decoding loop picked by itself: JSON has no nan."""
    return math.nan if value is None else value


def read_prompt_logprobs(
    prompt_ids: Sequence[int], entries: Sequence[Mapping[str, Mapping[str, Any]] | None]
) -> tuple[TokenLogprob, ...]:
    """Read what `prompt_logprobs` answers; nothing, where it was not asked for. The first token has no score.

    Raises:
        LookupError, TypeError, ValueError: the reply has another shape.
    """
    return tuple(
        _token_logprob(token_id, entry)
        for token_id, entry in zip(prompt_ids, entries, strict=bool(entries))
        if entry is not None
    )


def _token_logprob(token_id: int, entry: Mapping[str, Mapping[str, Any]]) -> TokenLogprob:
    ranked = sorted((one["rank"], int(i), one["logprob"]) for i, one in entry.items() if one["rank"])
    return TokenLogprob(
        logprob=entry[str(token_id)]["logprob"], top=tuple((i, level) for _, i, level in ranked)
    )
