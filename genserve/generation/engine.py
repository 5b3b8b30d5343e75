"""Engine: one step is plan, forward, pick and commit, over all running token sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from genserve.errors import SEE_LOG, GenserveError, ModelFailed
from genserve.generation.beam import Beam
from genserve.generation.commits import Commits, Outcome
from genserve.generation.decoding_loops import DecodeFunction, DecodingLoops
from genserve.generation.forwards import Forwards, note_computed
from genserve.generation.logits_model import LogitsArray, LogitsModel
from genserve.generation.logits_request import LogitsRequest
from genserve.generation.parked import hold_s
from genserve.generation.pick import RowPicker
from genserve.generation.planner import Prefill, PrefillBudget, StepPlan, Verify
from genserve.generation.residents import Occupant
from genserve.generation.roster import Roster
from genserve.generation.sampler import pick_rows
from genserve.generation.slots import Slots
from genserve.generation.speculation import Speculation
from genserve.generation.token_sequence import TokenSequence
from genserve.request import FinishReason

__all__ = ["Engine", "StepResult"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    advanced: tuple[TokenSequence, ...]                 # each has a delta to take; some have finished
    answered: tuple[tuple[LogitsRequest, LogitsArray], ...]   # a row each, the receiver's own
    failed: dict[Occupant, GenserveError]               # these have left without finishing
    begun: tuple[TokenSequence | LogitsRequest, ...]    # these have left the waiting line
    full: bool                                          # before it ended, somebody waited without a place
    num_prompt_tokens: int                              # tokens that a prefill ran; 0: it was a decode
    num_preempted: int                                  # so many had to leave their slots and wait again
    num_drafted: int                                    # tokens that a draft proposed
    num_accepted: int                                   # so many of them were right


class Engine:
    """Continuous batching over the slots of one logits model. One thread owns it.

    A token sequence that has finished leaves its tokens in its slot, and whoever begins with them goes
    on there, or with a copy. When the memory of the cache is short, what has been left goes first, then
    the youngest that runs has to wait again; its stream pauses, and its text is the same.

    Attributes:
        clock: seconds; by it a logits request says when it was submitted. Safe from any thread.
    """

    def __init__(
        self,
        model: LogitsModel,
        *,
        decode: DecodeFunction,
        budget: PrefillBudget | None = None,
        picker: RowPicker = pick_rows,
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing to do.

        Args:
            model: computes the logits.
            decode: the decoding loop of each token sequence.
            budget: of a prefill.
            picker: of the model's logits.
            prefix_cache: whether token sequences share what they begin with; logits requests always do.
            speculation: several tokens of a sequence in one step; None: never.
            clock: seconds.
        """
        self.clock = clock
        self._slots = Slots(model)
        self._forwards = Forwards(model, self._slots, verifier=speculation.verifier if speculation else None)
        self._speculation = speculation
        self._roster = Roster(
            self._slots,
            budget=budget or PrefillBudget(),
            prefix_cache=prefix_cache,
            speculation=speculation,
        )
        self._prefix_cache = prefix_cache
        self._loops = DecodingLoops(decode)
        self._commits = Commits(
            self._slots,
            self._loops,
            picker=picker,
            prefix_cache=prefix_cache,
            speculation=speculation,
            clock=clock,
        )
        self._step_started_s = 0.0
        self._timed: set[TokenSequence] = set()     # those that have a deadline

    @property
    def num_waiting(self) -> int:
        """How many wait for a slot."""
        return self._roster.num_waiting

    @property
    def num_running(self) -> int:
        """How many hold a slot and have something to compute."""
        return len(self._slots.running)

    @property
    def num_generating(self) -> int:
        """How many of those that run are ordinary token sequences."""
        return sum(not isinstance(s, LogitsRequest) for s in self._slots.running)

    @property
    def cache_usage(self) -> float:
        """The share of the cache's memory that those hold that run."""
        memory = self._slots.memory
        return sum(memory.rounded(s.num_computed) for s in self._slots.running) / memory.budget

    def add(self, occupant: Occupant) -> None:
        """Put it into the waiting line, or where all but the last of its tokens are known.

        Of the answers of a beam search the first one brings its beams.
        """
        beams = occupant.beams if isinstance(occupant, TokenSequence) else None
        if beams is None:
            self._roster.add(occupant)
        elif occupant is beams.answers[0]:
            self._roster.add(beams.lead)
        if isinstance(occupant, TokenSequence) and occupant.deadline_s is not None:
            self._timed.add(occupant)

    def remove(self, occupants: Iterable[Occupant]) -> None:
        """Drop token sequences and logits requests, wherever they are; their slots are free at once.

        A beam search leaves with the first of its answers that does.
        """
        leaving = set(occupants)
        if not leaving:
            return
        for beams in {s.beams for s in leaving if isinstance(s, TokenSequence) and s.beams}:
            leaving.update(beams.beams)
        self._roster.remove(leaving)
        self._timed -= leaving
        for occupant in leaving:
            if isinstance(occupant, TokenSequence):
                self._loops.drop(occupant)
                if self._speculation is not None:
                    self._speculation.drop(occupant)

    def expected_back(self, *, within_s: float) -> tuple[int, float]:
        """Return how many loops over the logits should ask again soon, and for how long to expect them.

        Args:
            within_s: they come back in less than this, or are not expected.
        """
        now_s = self.clock()
        since_s = [parked.since_s for parked in self._slots.expected(now_s, within_s=within_s)]
        return len(since_s), max(since_s, default=now_s) + within_s - now_s

    def longest(self, num_sequences: int) -> int:
        """Return how many tokens each of so many sequences that need each other may have; from any thread."""
        return self._slots.memory.longest(num_sequences)

    @property
    def held_s(self) -> float:
        """For how long no parked slot gives way, if each is held for the loop that it belongs to."""
        return max(0.0, self._slots.held_until_s - self.clock())

    def step(self) -> StepResult | None:
        """Run one forward and commit what it gives; None if nothing can be done now."""
        self._step_started_s = self.clock()
        plan = self._roster.plan(self._step_started_s)
        if plan is None:
            return None
        full = self._roster.full
        try:
            logits, rows = self._forward(plan)
        except Exception:
            logger.exception("forward failed")
            failure = ModelFailed("the model's forward failed", remedy=SEE_LOG)
            outcome = Outcome(failed=dict.fromkeys(_answering(plan.sequences), failure))
        else:
            outcome = self._commits.run(plan, logits, rows)
        return self._leave(plan, outcome, full=full)

    def check_integrity(self) -> None:
        """Raise AssertionError where slots and loops disagree; for tests."""
        self._slots.check_integrity()
        assert len(self._loops) <= self.num_running + self.num_waiting, "a loop outlived its sequence"
        assert all(s.num_pending >= 1 for s in self._slots.running), "a sequence runs with nothing to compute"

    def _forward(self, plan: StepPlan) -> tuple[LogitsArray, Sequence[int]]:
        """Run the plan; returns the logits, and the row of each of its sequences."""
        logits, rows = self._forwards.run(plan)
        if self._speculation is not None and not isinstance(plan, Prefill):
            # What the step took so far, drafts included.
            seconds = self.clock() - self._step_started_s
            self._speculation.note_step(
                num_rows=max(self._slots.of(plan.sequences)) + 1,
                seconds=seconds,
                verified=isinstance(plan, Verify),
            )
        note_computed(plan)
        return logits, rows

    def _leave(self, plan: StepPlan, outcome: Outcome, *, full: bool) -> StepResult:
        """Let go of those that failed, and park what those have computed that finished or are answered."""
        failed, now_s = outcome.failed, self.clock()
        late = self._end_late(now_s, failed)
        advanced = tuple(s for s in outcome.generating if s not in failed)
        finished = [s for s in advanced if s.finished]
        if self._prefix_cache:
            for sequence in finished:
                if sequence.beams is None:
                    self._slots.park(sequence, now_s=now_s)
        self.remove([*failed, *finished, *late])
        for request, _ in outcome.answered:
            held_s = hold_s(request.pause_s, step_s=now_s - self._step_started_s)
            self._slots.park(request, now_s=now_s, held_s=held_s)
        prompt_tokens = sum(plan.num_tokens) if isinstance(plan, Prefill) else 0
        return StepResult(
            advanced=(*advanced, *(s for s in late if s not in advanced and s not in failed)),
            answered=tuple(outcome.answered),
            failed=failed,
            begun=tuple(_answering(self._roster.begun)),
            full=full,
            num_prompt_tokens=prompt_tokens,
            num_preempted=self._roster.num_preempted,
            num_drafted=outcome.num_drafted,
            num_accepted=outcome.num_accepted,
        )

    def _end_late(self, now_s: float, failed: dict[Occupant, GenserveError]) -> list[TokenSequence]:
        """End those whose time is over, even if they still wait; returns them."""
        late = [s for s in self._timed if s.is_late(now_s) and s not in failed]
        for sequence in late:
            try:
                if sequence.beams is not None:
                    sequence.beams.settle()
                if not sequence.finished:
                    sequence.finish(FinishReason.LENGTH, stop_reason="deadline")
            except GenserveError as error:  # of an output parser
                failed[sequence] = error
        return late


def _answering(occupants: Iterable[Occupant]) -> Iterator[TokenSequence | LogitsRequest]:
    """Replace beams by the answers of their search."""
    for occupant in occupants:
        if isinstance(occupant, Beam):
            yield from occupant.search.answers
        else:
            yield occupant
