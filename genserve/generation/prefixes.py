"""Prefixes: how much two lists of tokens begin with in common, and what that is worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from genserve.generation.beam import Beam
from genserve.generation.residents import Occupant, Resident
from genserve.generation.token_sequence import TokenSequence

__all__ = ["Cached", "Growing", "Prefix", "awaited", "common_prefix", "longest_prefix", "worth_reusing"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The first `length` tokens of one that waits lie in a slot."""

    slot: int
    length: int
    is_whole: bool = False      # the slot holds nothing but tokens of that one


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


def longest_prefix(occupant: Occupant, residents: Iterable[Resident | None]) -> Prefix:
    """Return in which slot most of the first tokens of one that waits lie; its last one does not count.

    For a token sequence those do not count that a prefill has computed where it would decode, or the
    other way round: the last bits of these two differ, and its text must not depend on the cache.
    A beam takes the prompt alone, since it is to step with the others.

    Args:
        occupant: that waits.
        residents: by slot; those with another salt are passed over.
    """
    prefixes = (
        _prefix(occupant, resident, slot=slot)
        for slot, resident in enumerate(residents)
        if resident is not None and resident.cache_salt == occupant.cache_salt
    )
    return max(prefixes, key=lambda prefix: prefix.length, default=Prefix(slot=0, length=0))


def _prefix(occupant: Occupant, resident: Resident, *, slot: int) -> Prefix:
    common = common_prefix(resident.token_ids[: resident.num_computed], occupant.token_ids[:-1])
    is_whole = common == resident.num_computed
    num_prompt_tokens = occupant.num_prompt_tokens
    if isinstance(occupant, TokenSequence) and occupant.params.prompt_logprobs is not None:
        common = 0  # it wants the logits after every token
    elif isinstance(occupant, Beam) or (
        isinstance(occupant, TokenSequence) and resident.num_prefilled != num_prompt_tokens
    ):
        common = min(common, resident.num_prefilled, num_prompt_tokens)
    return Prefix(slot=slot, length=common, is_whole=is_whole)


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
