"""Scored tokens: log-probabilities of tokens that are called by their ids, as vLLM's extras write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genserve.request import TokenLogprob

__all__ = ["read_prompt_logprobs", "token_id_of"]

_PREFIX = "token_id:"


def token_id_of(name: str) -> int:
    """Return the id in a name that `return_tokens_as_token_ids` makes; raises ValueError."""
    return int(name.removeprefix(_PREFIX))


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
