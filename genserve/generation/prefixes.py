"""Prefixes: how much two lists of tokens begin with in common, and what that is worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["Cached", "Growing", "awaited", "common_prefix", "worth_reusing"]

# To go on behind a prefix takes a step of its own, since several rows with a past cannot share one; that
# costs about as much as so many tokens in a step that is shared.
OWN_STEP_TOKENS = 32
# With nobody there to share a step with, these are worth a copy.
WORTH_COPYING = 16


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


def worth_reusing(num_common: int, *, num_tokens: int, in_company: bool) -> bool:
    """Whether to begin with a cached prefix.

    Args:
        num_common: length of the prefix.
        num_tokens: of the whole prompt.
        in_company: others wait with whom it could share the step that computes all of it.
    """
    if in_company and num_common < num_tokens - 1:  # the last token alone goes with those that decode
        return num_common >= OWN_STEP_TOKENS
    return num_common >= WORTH_COPYING or 2 * num_common >= num_tokens


def awaited(candidate: Cached, computing: Iterable[Growing]) -> bool:
    """Whether one of these is about to compute so much of the candidate that it had better wait for that."""
    head = candidate.token_ids[:OWN_STEP_TOKENS]
    return len(head) == OWN_STEP_TOKENS and any(
        other.in_prompt
        and other.cache_salt == candidate.cache_salt
        and other.token_ids[:OWN_STEP_TOKENS] == head
        and common_prefix(candidate.token_ids[:-1], other.token_ids) >= other.num_computed + OWN_STEP_TOKENS
        for other in computing
    )
