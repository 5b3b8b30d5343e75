"""Prefixes: how much two lists of tokens begin with in common, and what that is worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["Cached", "Growing", "awaited", "common_prefix", "worth_reusing"]

# To go on behind a prefix takes a step of its own, since several rows with a past cannot share one. What
# such a step costs beyond its tokens is what so many tokens cost in a step with others.
OWN_STEP_TOKENS = 16


class Cached(Protocol):
    """Tokens of which the first ones are in the KV cache."""

    @property
    def token_ids(self) -> list[int]:
        """All of them."""

    @property
    def num_computed(self) -> int:
        """How many of them are in the cache."""

    @property
    def cache_salt(self) -> str | None:
        """Only those with the same salt may know of each other."""


class Growing(Cached, Protocol):
    """One that is being computed."""

    @property
    def num_prompt_tokens(self) -> int:
        """How many of its tokens are computed as a prompt."""

    @property
    def in_prompt(self) -> bool:
        """Whether more of it is to be computed than a decode step does."""


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens are the same; by halving, so that lists compare at C's speed."""
    same, limit = 0, min(len(first), len(second))
    probe = limit
    while same < limit:
        if first[same:probe] == second[same:probe]:
            same = probe
        else:
            limit = probe - 1
        probe = (same + limit + 1) // 2
    return same


def worth_reusing(num_common: int, *, num_tokens: int) -> bool:
    """Whether one of `num_tokens` had better begin with so many cached ones than compute all with others."""
    return num_common >= OWN_STEP_TOKENS or 2 * num_common >= num_tokens


def awaited(candidate: Cached, computing: Iterable[Growing]) -> bool:
    """Whether one of these is about to compute so much of the candidate that it had better wait for that."""
    head = candidate.token_ids[:OWN_STEP_TOKENS]
    return len(head) == OWN_STEP_TOKENS and any(
        other.in_prompt
        and other.cache_salt == candidate.cache_salt
        and other.token_ids[:OWN_STEP_TOKENS] == head
        and _coming(candidate, other) >= other.num_computed + OWN_STEP_TOKENS
        for other in computing
    )


def _coming(candidate: Cached, other: Growing) -> int:
    """Return how many first tokens of the candidate the other's prompt has, computed or not."""
    return min(common_prefix(candidate.token_ids[:-1], other.token_ids), other.num_prompt_tokens)
