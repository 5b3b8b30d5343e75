"""Planner: which forward runs next, and over which token sequences.

A step is one forward, and there are two kinds. GroupQueryAttention on CPU takes several rows of
several tokens only where nothing is cached yet, and several rows of one token anywhere. So a
*prefill* is either a group of whole prompts in fresh slots, or one chunk of one prompt of which the
first part is there, and a *decode* moves every running sequence by one token. While sequences decode,
the prefills between two decodes are bounded; while a long prompt is computed, its chunks alternate with
prompts that fit into one: it slows the others down and never stops them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from genserve.generation.prefixes import awaited
from genserve.generation.residents import Occupant

__all__ = ["Decode", "Prefill", "PrefillBudget", "Room", "StepPlan", "Verify", "plan_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBudget:
    """How many tokens, padding included, one prefill may hold.

    The pauses of decoding cost little: on two cores a decode step of B rows took 4.6 + 0.67 B ms, so
    interleaving 32 short prompts in groups of three adds about 1 % to a round of 128 tokens each.
    """

    alone: int = 512                # nobody decodes: the larger, the more efficient
    beside_decoding: int = 256      # all those between two decodes; a pause of 130 to 230 ms on two cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the KV cache has for those who wait."""

    slots: int
    tokens: int                             # memory
    headed_for: Callable[[int], int]        # how much of it one of so many tokens takes

    def fits(self, num_slots: int, *, longest: int) -> bool:
        """Whether sequences that need so many slots, padded to the longest, can begin."""
        return num_slots <= self.slots and num_slots * self.headed_for(longest) <= self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Run the next `num_tokens[i]` tokens of `sequences[i]`, which are in neighbouring slots."""

    sequences: tuple[Occupant, ...]
    num_tokens: tuple[int, ...]
    admits: bool                    # they come from the waiting line

    @property
    def num_padded(self) -> int:
        """Tokens that the forward runs, padding included."""
        return len(self.num_tokens) * max(self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Run one token of each of `sequences`."""

    sequences: tuple[Occupant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Run the tokens `tokens[i]` of `sequences[i]`, those that it has and drafted ones, instead of one."""

    sequences: tuple[Occupant, ...]
    tokens: tuple[tuple[int, ...], ...]     # of each 1 to `width`, the first is its own
    num_known: tuple[int, ...]              # so many of them are its own, the others drafted
    width: int                              # so many are run, padding included


StepPlan = Prefill | Decode | Verify


def plan_step(
    running: Sequence[Occupant],
    *,
    waiting: Sequence[Occupant],
    room: Room,
    last_prefill: Prefill | None,
    num_prefilled: int,
    budget: PrefillBudget,
    share_prefixes: bool,
) -> Prefill | Decode | None:
    """Choose the next forward; None if there is nothing to do.

    Args:
        running: by slot; those in the middle of their prompts among them.
        waiting: first come, first served.
        room: for them.
        last_prefill: the last of those.
        num_prefilled: tokens, padding included, of the prefills since the last decode.
        budget: limits of a prefill.
        share_prefixes: one that waits may begin with what another has computed.
    """
    decoding = tuple(s for s in running if not s.in_prompt)
    max_tokens = budget.beside_decoding - num_prefilled if decoding else budget.alone
    prefill = None
    if max_tokens > 0:
        prefill = _prefill(
            running,
            waiting=waiting,
            room=room,
            last_prefill=last_prefill,
            max_tokens=max_tokens,
            share_prefixes=share_prefixes,
        )
    if not decoding:
        return prefill
    # What is left of the budget is for prompts that it finishes, not for small chunks of long ones.
    if prefill and (num_prefilled == 0 or _finishes(prefill)):
        return prefill
    return Decode(sequences=decoding)


def _prefill(
    running: Sequence[Occupant],
    *,
    waiting: Sequence[Occupant],
    room: Room,
    last_prefill: Prefill | None,
    max_tokens: int,
    share_prefixes: bool,
) -> Prefill | None:
    """Choose between the chunks of those that have begun and whole prompts of those that wait."""
    partial = sorted((s for s in running if s.in_prompt), key=lambda s: s.num_to_prefill)
    if len(partial) > 1 and not _continues(last_prefill, partial[0]):
        return _chunk(partial[0], max_tokens=max_tokens)
    if not partial or _continues(last_prefill, partial[-1]):
        computing = running if share_prefixes else None
        group = _whole_prompts(waiting, computing=computing, room=room, max_tokens=max_tokens)
        if group and (not partial or group[0].num_to_prefill <= max_tokens):
            num_tokens = tuple(min(s.num_to_prefill, max_tokens) for s in group)
            return Prefill(sequences=group, num_tokens=num_tokens, admits=True)
    return _chunk(partial[-1], max_tokens=max_tokens) if partial else None


def _chunk(sequence: Occupant, *, max_tokens: int) -> Prefill:
    num_tokens = min(max_tokens, sequence.num_to_prefill)
    return Prefill(sequences=(sequence,), num_tokens=(num_tokens,), admits=False)


def _finishes(prefill: Prefill) -> bool:
    return all(n == s.num_to_prefill for s, n in zip(prefill.sequences, prefill.num_tokens, strict=True))


def _continues(prefill: Prefill | None, sequence: Occupant) -> bool:
    """Whether a prefill was of this sequence."""
    return prefill is not None and sequence in prefill.sequences


def _whole_prompts(
    waiting: Sequence[Occupant], *, computing: Sequence[Occupant] | None, room: Room, max_tokens: int
) -> tuple[Occupant, ...]:
    """Take prompts from the head of the line while their padded batch fits, if one does at all.

    A first prompt longer than `max_tokens` is taken alone, and its first chunk run. One whose first
    tokens one of `computing` or of the group is about to compute waits for these; None: nobody waits.
    """
    group: list[Occupant] = []
    longest = num_slots = 0
    for sequence in waiting:
        if computing is not None and awaited(sequence, (*computing, *group)):
            continue
        longest = max(longest, sequence.num_to_prefill)
        if group and longest * (len(group) + 1) > max_tokens:
            break
        num_slots += sequence.num_slots
        if not room.fits(num_slots, longest=max(longest, len(sequence.token_ids))):
            break
        group.append(sequence)
    return tuple(group)
