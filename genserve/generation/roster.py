"""Roster: who waits, who runs, and what the next step is."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import islice

from genserve.generation.beam import Beam
from genserve.generation.logits_request import LogitsRequest
from genserve.generation.planner import Decode, Prefill, PrefillBudget, Room, StepPlan, Verify, plan_step
from genserve.generation.prefixes import awaited, longest_prefix, worth_reusing
from genserve.generation.residents import Occupant
from genserve.generation.slots import Slots
from genserve.generation.speculation import Speculation

__all__ = ["Roster"]


class Roster:
    """Gives slots and memory to those that wait, and takes them back if need be.

    The line is in the order of priority; of equals, first come, first served.

    Belongs to the engine's thread.

    Attributes:
        num_preempted: how many had to leave their slots and wait again, by the last `plan`.
        begun: those that left the line for a slot by the last `plan`, and kept it.
    """

    def __init__(
        self, slots: Slots, *, budget: PrefillBudget, prefix_cache: bool, speculation: Speculation | None
    ) -> None:
        """Begin with an empty line; see `Engine`."""
        self.num_preempted = 0
        self.begun: list[Occupant] = []
        self._slots = slots
        self._budget = budget
        self._prefix_cache = prefix_cache
        self._speculation = speculation
        self._waiting: deque[Occupant] = deque()
        self._last_prefill: Prefill | None = None
        self._num_prefilled = 0     # tokens, padding included, since the last decode
        self._now_s = 0.0

    @property
    def num_waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether somebody waits, and the first of them finds no slot or no memory."""
        if not self._waiting:
            return False
        head = self._waiting[0]
        return not self._room().fits(head.num_slots, longest=len(head.token_ids))

    def add(self, occupant: Occupant) -> None:
        """Put it into the line, or where all but the last of its tokens are known."""
        if isinstance(occupant, LogitsRequest) and self._slots.resume(occupant):
            return
        place = len(self._waiting)
        while place and self._waiting[place - 1].priority > occupant.priority:
            place -= 1
        self._waiting.insert(place, occupant)

    def remove(self, leaving: Collection[Occupant]) -> None:
        """Drop them, wherever they are; their slots are free at once."""
        self._waiting = deque(s for s in self._waiting if s not in leaving)
        self._slots.release(leaving)

    def plan(self, now_s: float) -> StepPlan | None:
        """Choose the next forward, and give its sequences slots and memory; None: nothing can be done."""
        self._now_s = now_s
        self.num_preempted = 0
        self.begun = []
        while True:
            self._pack()
            self._admit_with_prefixes()
            self._complete_searches()
            plan = plan_step(
                self._slots.running,
                waiting=list(islice(self._waiting, self._slots.num_slots)),
                room=self._room(),
                last_prefill=self._last_prefill,
                num_prefilled=self._num_prefilled,
                budget=self._budget,
                share_prefixes=self._prefix_cache,
            )
            if plan is None:
                return None
            if isinstance(plan, Prefill) and plan.admits:
                for sequence in plan.sequences:
                    self._waiting.remove(sequence)
                self.begun += plan.sequences
                self._slots.take(plan.sequences, now_s=self._now_s)
            if self._slots.hold(self._lengths(plan)):
                break
            self._preempt(self._slots.youngest)
        self._note(plan)
        return self._with_drafts(plan) if isinstance(plan, Decode) else plan

    def _room(self) -> Room:
        return Room(
            slots=self._slots.room,
            tokens=self._slots.room_tokens,
            headed_for=self._slots.memory.headed_for,
        )

    def _with_drafts(self, decode: Decode) -> Decode | Verify:
        """Return a verification in the place of a decode where that is likely to be faster, and has room."""
        if self._speculation is None:
            return decode
        num_tokens = self._speculation.verifier.num_tokens
        rows = self._slots.residents[: max(self._slots.of(decode.sequences)) + 1]
        if any(r and r.num_computed + num_tokens > self._slots.max_length for r in rows):
            return decode
        verify = self._speculation.plan(decode.sequences, num_rows=len(rows))
        if verify is None or self._slots.hold(self._lengths(verify)):
            return verify or decode
        self._slots.hold(self._lengths(decode))     # an idle row may be empty now, and writes somewhere
        return decode

    def _note(self, plan: StepPlan) -> None:
        """Keep what the next plan depends on."""
        if isinstance(plan, Prefill):
            self._last_prefill = plan
            pausing = any(not s.in_prompt and s not in plan.sequences for s in self._slots.running)
            self._num_prefilled = plan.num_padded + (self._num_prefilled if pausing else 0)
        else:
            self._num_prefilled = 0

    def _pack(self) -> None:
        """Close the gaps between those that run, if need be without some of them."""
        while leaving := self._slots.pack(self._now_s):
            for occupant in leaving:
                if self._slots.runs(occupant):
                    self._preempt(occupant)

    def _complete_searches(self) -> None:
        """Give the other beams their slots where the first one has computed the prompt."""
        leads = [s for s in self._slots.running if isinstance(s, Beam) and s.num_slots > 1]
        for lead in leads:
            if self._slots.runs(lead) and not lead.in_prompt:
                self._seat_others(lead)

    def _seat_others(self, lead: Beam) -> None:
        """Seat the other beams of a search, if need be instead of those that came last."""
        for beam in lead.search.beams[1:]:
            lead.num_slots -= 1     # it is not promised any more, but taken
            while not self._slots.branch(beam, lead, now_s=self._now_s):
                self._preempt(self._slots.youngest)
                self._pack()
                if not self._slots.runs(lead):
                    return

    def _preempt(self, occupant: Occupant) -> None:
        """Send one that runs back to the head of the line; of a beam search all."""
        if isinstance(occupant, Beam):
            search, occupant = occupant.search, occupant.search.lead
            self._slots.release(search.beams[1:])
            search.preempt()
        self._slots.park(occupant, now_s=self._now_s)
        occupant.preempt()
        self._waiting.appendleft(occupant)
        if occupant in self.begun:  # it was admitted by this very plan
            self.begun.remove(occupant)
        self.num_preempted += 1

    def _lengths(self, plan: StepPlan) -> dict[int, int]:
        """Return how many positions of which slots a plan's forward writes to, idle rows included."""
        slots = self._slots.of(plan.sequences)
        if isinstance(plan, Prefill):
            # One more: a single token is padded.
            length = plan.sequences[0].num_computed + max(plan.num_tokens) + 1
            return dict.fromkeys(slots, min(length, self._slots.max_length))
        width = plan.width if isinstance(plan, Verify) else 1
        residents = self._slots.residents[: max(slots) + 1]
        return {slot: (r.num_computed if r else 0) + width for slot, r in enumerate(residents)}

    def _admit_with_prefixes(self) -> None:
        """Admit those at the head of the line whose first tokens lie in some slot, while they can go on."""
        for occupant in list(islice(self._waiting, self._slots.num_slots)):
            if self._slots.room < occupant.num_slots:
                return
            if not (self._prefix_cache or isinstance(occupant, LogitsRequest)):
                return
            if self._prefix_cache and awaited(occupant, self._slots.running):
                continue
            if not self._begin_with_prefix(occupant):
                return

    def _begin_with_prefix(self, occupant: Occupant) -> bool:
        """Admit one that waits, with what lies in some slot; False if that is not worth it, or not yet."""
        prefix = longest_prefix(occupant, self._slots.residents)
        if not worth_reusing(prefix.length, num_tokens=occupant.num_prompt_tokens):
            return False
        # One may be in the middle of a long prompt, and one of a short one.
        short = self._budget.beside_decoding
        others = [s.num_to_prefill for s in self._slots.running if s.in_prompt]
        if others and (min(others) <= short or occupant.num_prompt_tokens - prefix.length > short):
            return False
        if not self._slots.reuse(occupant, prefix, now_s=self._now_s):
            return False
        self._waiting.remove(occupant)
        self.begun.append(occupant)
        if not isinstance(occupant, LogitsRequest) and not occupant.preempted:
            occupant.num_cached_tokens = prefix.length
        self._pack()
        return True
