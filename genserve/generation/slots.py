"""Slots: which token sequence sits where in the KV cache."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from genserve.generation.cache_memory import CacheMemory
from genserve.generation.compaction import Move, compaction
from genserve.generation.logits_model import LogitsModel
from genserve.generation.logits_request import LogitsRequest
from genserve.generation.parked import Parked
from genserve.generation.prefixes import Prefix
from genserve.generation.residents import Occupant, Resident

__all__ = ["Slots"]


class Slots:
    """Who is in which slot of the KV cache. Belongs to the engine's thread.

    Those that run, and the parked ones that are held for their loops, are in front, so that a decode
    step is one forward over the slots 0 to B-1, with idle rows for those that are away. Behind them lie
    the other parked ones; they make room for whoever needs it, least recently used first: a slot, or memory
    for which the last of their tokens go.

    An idle row takes 0.7 ms of a step of the default model, a move 0.2 ms per 100 tokens: to be moved
    out and in again at each step is what a loop must be spared, to be moved once is nothing.
    """

    def __init__(self, model: LogitsModel) -> None:
        self._model = model
        self._residents: list[Resident | None] = [None] * model.num_slots
        self._num_front = 0     # as the last `pack` and `take` left it
        self._memory = CacheMemory(model)
        self._by_age: dict[Occupant, None] = {}     # those that run, as they were given a slot

    @property
    def residents(self) -> Sequence[Resident | None]:
        """Who is in which slot."""
        return self._residents

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return len(self._residents)

    @property
    def max_length(self) -> int:
        """How many tokens one slot holds."""
        return self._model.max_length

    def of(self, occupants: Iterable[Occupant]) -> list[int]:
        """Return the slot of each."""
        slot_of = {resident: slot for slot, resident in enumerate(self._residents) if resident}
        return [slot_of[occupant] for occupant in occupants]

    @property
    def running(self) -> list[Occupant]:
        """Those that have something to compute, by slot."""
        return [r for r in self._residents if r is not None and not isinstance(r, Parked)]

    @property
    def room(self) -> int:
        """How many slots are free for others, right after `pack`."""
        promised = sum(s.num_slots - 1 for s in self._by_age)
        return len(self._residents) - self._num_front - promised

    @property
    def memory(self) -> CacheMemory:
        """What the slots hold."""
        return self._memory

    @property
    def room_tokens(self) -> int:
        """How many tokens of memory those may take that wait, so that it will do for those that run too."""
        memory = self._memory
        return memory.budget - sum(memory.headed_for(len(s.token_ids)) * s.num_slots for s in self._by_age)

    @property
    def youngest(self) -> Occupant:
        """Of those that run, the one that was given its slot last."""
        return next(reversed(self._by_age))

    def pack(self, now_s: float) -> list[Occupant]:
        """Bring to the front whoever belongs there, by moving as little as can be.

        Returns:
            Those that must leave instead, since memory is too short to move them.
        """
        front = [self._in_front(resident, now_s) for resident in self._residents]
        self._num_front = sum(front)
        leaving: list[Occupant] = []
        for move in compaction(front):
            self._clear(move.target, behind=self._num_front, now_s=now_s)
            resident = self._residents[move.source]  # a parked one may be gone by now
            if resident and not self._move(move) and not isinstance(resident, Parked):
                leaving.append(resident)
        return leaving

    def take(self, occupants: Iterable[Occupant], *, now_s: float) -> None:
        """Give each the next slot behind the front; `room` says how many there are."""
        arriving = list(occupants)
        first, self._num_front = self._num_front, self._num_front + len(arriving)
        for slot, occupant in enumerate(arriving, start=first):
            self._clear(slot, behind=self._num_front, now_s=now_s)
            self._seat(slot, occupant)

    def hold(self, lengths: Mapping[int, int], *, keep: Collection[int | None] = ()) -> bool:
        """Take memory for so many tokens in each of these slots, from parked ones where it is short.

        Args:
            lengths: tokens, by slot. A parked one among them, an idle row, may be forgotten like others.
            keep: slots that lose nothing.

        Returns:
            False: those that run hold too much; nothing was taken, but parked ones may be gone.
        """
        if self._memory.missing(lengths) > 0:
            lengths = self._free_memory(lengths, keep=keep)
            if self._memory.missing(lengths) > 0:
                return False
        self._memory.hold(lengths)
        return True

    def resume(self, request: LogitsRequest) -> bool:
        """Let the request go on in a slot where only its last token is missing; False if there is none."""
        known = request.token_ids[:-1]
        if not known:
            return False
        for slot, resident in enumerate(self._residents):
            if (
                isinstance(resident, Parked)
                and resident.cache_salt == request.cache_salt
                and resident.token_ids in (known, request.token_ids)
            ):
                length = min(resident.num_computed, len(request.token_ids) - 1)
                self._take_over(slot, resident, request, length=length)
                return True
        return False

    def reuse(self, occupant: Occupant, prefix: Prefix, *, now_s: float) -> bool:
        """Give one that waits a slot that holds its prefix; False if memory is too short.

        Needs `room`. What belongs to somebody who may go on with it is copied, not taken.
        """
        if self._memory.headed_for(len(occupant.token_ids)) * occupant.num_slots > self.room_tokens:
            return False
        resident = self._residents[prefix.slot]
        assert resident is not None
        if isinstance(resident, Parked) and prefix.is_whole:
            self._take_over(prefix.slot, resident, occupant, length=prefix.length)
            return True
        target = self._num_front
        self._clear(target, behind=target + 1, now_s=now_s, keep=prefix.slot)
        if target != prefix.slot:
            if not self.hold({target: prefix.length}, keep=(prefix.slot,)):
                return False
            self._model.move(source=prefix.slot, target=target, length=prefix.length)
        self._num_front += 1
        occupant.num_computed = prefix.length
        occupant.num_prefilled = min(prefix.length, resident.num_prefilled)
        self._seat(target, occupant)
        return True

    def branch(self, occupant: Occupant, source: Occupant, *, now_s: float) -> bool:
        """Give one a slot with the prompt of another that runs; False if there is no room or memory."""
        if self.room < 1:
            return False
        [slot] = self.of([source])
        return self.reuse(occupant, Prefix(slot=slot, length=source.num_prompt_tokens), now_s=now_s)

    def runs(self, occupant: Occupant) -> bool:
        """Whether it has a slot."""
        return occupant in self._by_age

    def copy(self, *, source: Occupant, target: Occupant) -> None:
        """Have the slot of one that runs hold what another's holds, which is as much as it held."""
        source_slot, target_slot = self.of([source, target])
        self._model.move(source=source_slot, target=target_slot, length=source.num_computed)

    def park(self, occupant: Occupant, *, now_s: float, held_s: float = 0.0) -> None:
        """Keep what one that leaves has computed, for whoever begins with it; its slot is held for `held_s`.

        A full slot is let go: nothing can follow, and an idle row writes one position further.
        """
        parked = Parked(
            token_ids=occupant.token_ids[: occupant.num_computed],
            num_prefilled=occupant.num_prefilled,
            cache_salt=occupant.cache_salt,
            since_s=now_s,
            held_until_s=now_s + held_s,
            pause_s=occupant.pause_s if isinstance(occupant, LogitsRequest) else math.inf,
        )
        usable = 0 < occupant.num_computed < self._model.max_length
        self._residents[self._residents.index(occupant)] = parked if usable else None
        del self._by_age[occupant]

    def release(self, leaving: Collection[Occupant]) -> None:
        """Free the slots of `leaving`."""
        self._residents = [None if resident in leaving else resident for resident in self._residents]
        for occupant in leaving:
            self._by_age.pop(occupant, None)

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
        assert sum(s.in_prompt for s in self.running) <= 2, "three are in the middle of their prompts"
        parked = [r for r in residents if isinstance(r, Parked)]
        assert all(0 < p.num_computed < self._model.max_length for p in parked), "no room for an idle row"
        assert set(self._by_age) == set(self.running), "the ages are not of those that run"
        assert self._memory.held <= self._memory.budget, "more memory is held than the budget allows"

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
        if free != slot and not self._move(Move(source=slot, target=free), keep=keep):
            self._residents[slot] = None

    def _move(self, move: Move, *, keep: int | None = None) -> bool:
        """Move a resident; False if memory is too short for the two copies of the moment."""
        resident = self._residents[move.source]
        assert resident is not None
        if not self.hold({move.target: resident.num_computed}, keep=(move.source, keep)):
            return False
        self._model.move(source=move.source, target=move.target, length=resident.num_computed)
        self._residents[move.target], self._residents[move.source] = resident, None
        return True

    def _seat(self, slot: int, occupant: Occupant) -> None:
        self._residents[slot] = occupant
        self._by_age[occupant] = None

    def _take_over(self, slot: int, parked: Parked, occupant: Occupant, *, length: int) -> None:
        occupant.num_computed = length
        occupant.num_prefilled = min(length, parked.num_prefilled)
        if isinstance(occupant, LogitsRequest):
            occupant.pause_s = occupant.submitted_s - parked.since_s
        self._seat(slot, occupant)

    def _parked_by_age(self) -> list[int]:
        """Return the slots of the parked ones, least recently used first."""
        since_s = {slot: r.since_s for slot, r in enumerate(self._residents) if isinstance(r, Parked)}
        return sorted(since_s, key=lambda slot: since_s[slot])

    def _free_memory(self, lengths: Mapping[int, int], *, keep: Collection[int | None]) -> dict[int, int]:
        """Give back what `hold` needs, if there is so much; returns the lengths, 1 for one that is gone."""
        for slot, resident in enumerate(self._residents):
            used = resident.num_computed if resident is not None else 0
            self._memory.give_back(slot, length=max(used, lengths.get(slot, 0)))
        needed = dict(lengths)
        for slot in self._parked_by_age():
            missing = self._memory.missing(needed)
            if missing <= 0:
                break
            if slot in needed and slot not in keep:
                self._shorten(slot, by=self._memory.budget)
                needed[slot] = 1
            elif slot not in keep:
                self._shorten(slot, by=missing)
        return needed

    def _shorten(self, slot: int, *, by: int) -> None:
        """Give back the memory of the last tokens of a parked one; `by` is in whole pages."""
        parked = self._residents[slot]
        assert isinstance(parked, Parked)
        length = max(0, self._memory.rounded(parked.num_computed) - by)
        rest = replace(
            parked, token_ids=parked.token_ids[:length], num_prefilled=min(length, parked.num_prefilled)
        )
        self._residents[slot] = rest if length else None
        self._memory.give_back(slot, length=length)
