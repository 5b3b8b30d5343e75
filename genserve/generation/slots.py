"""Slots: which token sequence sits where in the KV cache."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from genserve.generation.logits_model import LogitsModel
from genserve.generation.logits_request import LogitsRequest
from genserve.generation.token_sequence import TokenSequence

__all__ = ["Move", "Occupant", "Parked", "Resident", "Slots", "common_prefix", "compaction", "hold_s"]

# A loop that is away keeps its slot, as a running sequence does, for so long and a few times its last pause.
HOLD_S = 0.02
NUM_PAUSES = 4
LONGEST_PAUSE_S = 1.0   # one that was away for longer is like one that has not come back yet

# Fewer common tokens than this are not worth leaving the prefill of a group, unless they are half of all.
WORTH_COPYING = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parked:
    """What an answered logits request leaves in its slot: tokens that the next one may begin with."""

    token_ids: list[int]
    since_s: float
    held_until_s: float     # until then its slot is its own
    pause_s: float          # how long its caller was away the last time; infinite: it has not come back yet

    @property
    def num_computed(self) -> int:
        """How many of the tokens are in the KV cache: all."""
        return len(self.token_ids)


Occupant: TypeAlias = TokenSequence | LogitsRequest     # has something to compute
Resident: TypeAlias = Occupant | Parked


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Slot `target` takes over what slot `source` holds."""

    source: int
    target: int


class Slots:
    """Who is in which slot of the KV cache. Belongs to the engine's thread.

    Those that run, and the parked ones that are held for their loops, are in front, so that a decode
    step is one forward over the slots 0 to B-1, with idle rows for those that are away. Behind them lie
    the other parked ones; they make room for whoever needs it, least recently used first.

    An idle row takes 0.7 ms of a step of the default model, a move 0.2 ms per 100 tokens: to be moved
    out and in again at each step is what a loop must be spared, to be moved once is nothing.
    """

    def __init__(self, model: LogitsModel) -> None:
        self._model = model
        self._residents: list[Resident | None] = [None] * model.num_slots
        self._num_front = 0     # as the last `pack` and `take` left it

    @property
    def residents(self) -> Sequence[Resident | None]:
        """Who is in which slot."""
        return self._residents

    @property
    def running(self) -> list[Occupant]:
        """Those that have something to compute, by slot."""
        return [r for r in self._residents if r is not None and not isinstance(r, Parked)]

    @property
    def room(self) -> int:
        """How many `take` would accept, right after `pack`."""
        return len(self._residents) - self._num_front

    def pack(self, now_s: float) -> None:
        """Bring to the front whoever belongs there, by moving as little as can be."""
        front = [self._in_front(resident, now_s) for resident in self._residents]
        self._num_front = sum(front)
        for move in compaction(front):
            self._clear(move.target, behind=self._num_front, now_s=now_s)
            self._move(move)

    def take(self, occupants: Iterable[Occupant], *, now_s: float) -> None:
        """Give each the next slot behind the front; `room` says how many fit."""
        arriving = list(occupants)
        first, self._num_front = self._num_front, self._num_front + len(arriving)
        for slot, occupant in enumerate(arriving, start=first):
            self._clear(slot, behind=self._num_front, now_s=now_s)
            self._residents[slot] = occupant

    def resume(self, request: LogitsRequest) -> bool:
        """Let the request go on in a slot where only its last token is missing; False if there is none."""
        known = request.token_ids[:-1]
        if not known:
            return False
        for slot, resident in enumerate(self._residents):
            if isinstance(resident, Parked) and resident.token_ids in (known, request.token_ids):
                self._take_over(slot, resident, request)
                return True
        return False

    def reuse(self, request: LogitsRequest, *, now_s: float) -> bool:
        """Give the request a slot that holds what it has in common with another; False if not worth it.

        Needs `room`. What belongs to somebody who may go on with it is copied, not taken.
        """
        source, common = self._longest_prefix(request.token_ids[:-1])
        if common < WORTH_COPYING and 2 * common < len(request.token_ids):
            return False
        resident = self._residents[source]
        assert resident is not None
        if isinstance(resident, Parked) and common == len(resident.token_ids):
            self._take_over(source, resident, request)
            return True
        target, self._num_front = self._num_front, self._num_front + 1
        self._clear(target, behind=self._num_front, now_s=now_s, keep=source)
        if target != source:
            self._model.move(source=source, target=target, length=common)
        self._residents[target] = request
        request.num_computed = common
        return True

    def park(self, request: LogitsRequest, *, now_s: float, step_s: float) -> None:
        """Keep what an answered request has computed, for the next one; its step took `step_s`.

        A full slot is let go: nothing can follow, and an idle row writes one position further.
        """
        parked = Parked(
            token_ids=request.token_ids,
            since_s=now_s,
            held_until_s=now_s + hold_s(request.pause_s, step_s=step_s),
            pause_s=request.pause_s,
        )
        full = len(request.token_ids) == self._model.max_length
        self._residents[self._residents.index(request)] = None if full else parked

    def release(self, leaving: Collection[Occupant]) -> None:
        """Free the slots of `leaving`."""
        self._residents = [None if resident in leaving else resident for resident in self._residents]

    @property
    def held_until_s(self) -> float:
        """When the first of the parked ones is no longer held; infinite if there is none."""
        return min((r.held_until_s for r in self._residents if isinstance(r, Parked)), default=math.inf)

    def expected(self, now_s: float, *, within_s: float) -> list[Parked]:
        """Return the parked ones whose loops should be back in less than `within_s` after they left."""
        parked = [r for r in self._residents if isinstance(r, Parked)]
        return [p for p in parked if p.pause_s < within_s and now_s - p.since_s < within_s]

    def check_integrity(self) -> None:
        """Raise AssertionError where the slots are in a state that must not be; for tests."""
        residents = [r for r in self._residents if r is not None]
        assert len(self._residents) == self._model.num_slots, "a slot was lost or invented"
        assert len(set(residents)) == len(residents), "somebody sits in two slots"
        assert sum(s.in_prompt for s in self.running) <= 1, "two are in the middle of their prompts"
        parked = [r for r in residents if isinstance(r, Parked)]
        assert all(0 < p.num_computed < self._model.max_length for p in parked), "no room for an idle row"

    def _in_front(self, resident: Resident | None, now_s: float) -> bool:
        if isinstance(resident, Parked):
            return now_s < resident.held_until_s
        return resident is not None

    def _clear(self, slot: int, *, behind: int, now_s: float, keep: int | None = None) -> None:
        """Free a slot of a parked one: move it to a free slot from `behind` on, or forget the oldest.

        `keep` is not forgotten, unless it is `slot` itself.
        """
        if self._residents[slot] is None:
            return
        places = range(behind, len(self._residents))
        free = next((place for place in places if self._residents[place] is None), None)
        if free is None:
            ages = {
                place: resident.since_s
                for place in (slot, *places)
                if isinstance(resident := self._residents[place], Parked)
                and (place == slot or (place != keep and not self._in_front(resident, now_s)))
            }
            free = min(ages, key=lambda place: ages[place])
            self._residents[free] = None
        if free != slot:
            self._move(Move(source=slot, target=free))

    def _move(self, move: Move) -> None:
        resident = self._residents[move.source]
        assert resident is not None
        self._model.move(source=move.source, target=move.target, length=resident.num_computed)
        self._residents[move.target], self._residents[move.source] = resident, None

    def _take_over(self, slot: int, parked: Parked, request: LogitsRequest) -> None:
        request.num_computed = min(parked.num_computed, len(request.token_ids) - 1)
        request.pause_s = request.submitted_s - parked.since_s
        self._residents[slot] = request

    def _longest_prefix(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Return the slot that holds the most of the first `token_ids`, and how many."""
        return max(
            (
                (slot, common_prefix(resident.token_ids[: resident.num_computed], token_ids))
                for slot, resident in enumerate(self._residents)
                if resident is not None
            ),
            key=lambda match: match[1],
            default=(0, 0),
        )


def hold_s(pause_s: float, *, step_s: float) -> float:
    """Return how long an answered request's slot is held for a caller that was away for `pause_s`.

    Who has not come back yet may never do so; to hold its slot for half the time that it took to
    compute what is in it costs less than to lose that.
    """
    return HOLD_S + NUM_PAUSES * pause_s if pause_s < LONGEST_PAUSE_S else min(HOLD_S, step_s / 2)


def compaction(front: Sequence[bool]) -> list[Move]:
    """Return the moves, in order, that leave no gap among those in front.

    Args:
        front: by slot, whether it holds one that belongs there.
    """
    num_front = sum(front)
    holes = [slot for slot in range(num_front) if not front[slot]]
    behind = [slot for slot in range(num_front, len(front)) if front[slot]]
    return [Move(source=source, target=target) for source, target in zip(behind, holes, strict=True)]


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
