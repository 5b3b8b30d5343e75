"""Engine: one step is plan, forward, pick and commit, over all running token sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from genserve.errors import GenserveError, InvalidRequest, ModelFailed
from genserve.generation.beam import Beam
from genserve.generation.decoding_loops import DecodeFunction, DecodingLoops
from genserve.generation.forwards import Forwards, note_computed
from genserve.generation.likelihood import likelihood
from genserve.generation.logits_model import LogitsArray, LogitsModel, on_host
from genserve.generation.logits_request import LogitsRequest
from genserve.generation.parked import hold_s
from genserve.generation.pick import RowPicker, pick
from genserve.generation.planner import Prefill, PrefillBudget, StepPlan, Verify
from genserve.generation.roster import Roster
from genserve.generation.sampler import pick_rows, select_rows
from genserve.generation.slots import Occupant, Slots
from genserve.generation.speculation import Speculation
from genserve.generation.token_sequence import TokenSequence, Want
from genserve.request import FinishReason

__all__ = ["Engine", "StepResult"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    advanced: tuple[TokenSequence, ...]                 # each has a delta to take; some have finished
    answered: tuple[tuple[LogitsRequest, LogitsArray], ...]   # a row each, the receiver's own
    failed: dict[Occupant, GenserveError]               # these have left without finishing
    num_prompt_tokens: int                              # tokens that a prefill ran; 0: it was a decode
    num_preempted: int                                  # so many had to leave their slots and wait again
    num_drafted: int                                    # tokens that a draft proposed
    num_accepted: int                                   # so many of them were right


@dataclass(slots=True, kw_only=True)
class _Outcome:
    """What a step has done so far."""

    generating: dict[TokenSequence, None] = field(default_factory=dict)
    answered: list[tuple[LogitsRequest, LogitsArray]] = field(default_factory=list)
    failed: dict[Occupant, GenserveError] = field(default_factory=dict)
    num_drafted: int = 0
    num_accepted: int = 0


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
        self._picker = picker
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
        try:
            logits, rows = self._forward(plan)
        except Exception as error:
            logger.exception("forward failed")
            failure = ModelFailed(f"the model's forward failed: {type(error).__name__}")
            outcome = _Outcome()
            outcome.failed.update(dict.fromkeys(_answering(plan.sequences), failure))
            return self._leave(plan, outcome)
        return self._commit(plan, logits, rows)

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

    def _commit(self, plan: StepPlan, logits: LogitsArray, rows: Sequence[int]) -> StepResult:
        """Give each that is fully computed its token or its row, and after a verification the next ones."""
        outcome = _Outcome()
        self._commit_rows(logits, list(zip(rows, plan.sequences, strict=True)), outcome)
        if isinstance(plan, Verify):
            self._follow(plan, logits, rows, outcome)
        return self._leave(plan, outcome)

    def _follow(self, plan: Verify, logits: LogitsArray, rows: Sequence[int], outcome: _Outcome) -> None:
        """Go on with each sequence as long as its tokens are those that were run."""
        assert self._speculation is not None
        following = list(zip(rows, plan.sequences, plan.tokens, strict=True))
        num_right = dict.fromkeys(plan.sequences, 1)
        for position in range(1, plan.width):
            following = [
                (row, s, tokens)
                for row, s, tokens in following
                if s not in outcome.failed and _has_next(s, tokens[position:])
            ]
            for _, sequence, _ in following:
                sequence.num_computed += 1
                num_right[sequence] += 1
            self._commit_rows(logits, [(row + position, s) for row, s, _ in following], outcome)
        for sequence, num_known, tokens in zip(plan.sequences, plan.num_known, plan.tokens, strict=True):
            if isinstance(sequence, TokenSequence) and num_known < len(tokens):
                accepted = max(0, num_right[sequence] - num_known)
                outcome.num_drafted += len(tokens) - num_known
                outcome.num_accepted += accepted
                self._speculation.note_outcome(sequence, accepted=accepted)

    def _commit_rows(
        self, logits: LogitsArray, rows: Sequence[tuple[int, Occupant]], outcome: _Outcome
    ) -> None:
        """Give each of those that is fully computed its token or its row."""
        ready = [(row, s) for row, s in rows if s.num_pending == 0]
        asking = [(row, s) for row, s in ready if isinstance(s, LogitsRequest)]
        # To index with a list is to copy, for numpy and for torch: the buffer is the next step's.
        rows_asked = logits[[row for row, _ in asking]] if asking else ()
        outcome.answered += [(s, row) for (_, s), row in zip(asking, rows_asked, strict=True)]
        _score(logits, rows)
        generating = [(row, s) for row, s in ready if isinstance(s, TokenSequence)]
        outcome.generating |= dict.fromkeys(s for _, s in generating)
        failed = outcome.failed
        sampling: list[tuple[int, TokenSequence]] = []
        for row, sequence in generating:
            try:
                want = self._loops.want(sequence)
                if sequence.num_pending:
                    continue  # it began with tokens of its own: these logits are not what it waits for
                if want is Want.LOGITS:
                    self._loops.resume(sequence, logits[row])
                elif want is Want.SAMPLE:
                    sampling.append((row, sequence))
            except GenserveError as error:
                failed[sequence] = error
        self._sample(logits, sampling, failed)
        searched = self._search(logits, {s: row for row, s in ready if isinstance(s, Beam)}, failed)
        outcome.generating |= dict.fromkeys(searched)

    def _search(
        self, logits: LogitsArray, row_of: Mapping[Beam, int], failed: dict[Occupant, GenserveError]
    ) -> list[TokenSequence]:
        """Move each beam search by one token; returns the answers."""
        advanced: list[TokenSequence] = []
        for search in dict.fromkeys(beam.search for beam in row_of):
            rows = logits[[row_of[beam] for beam in search.beams if beam in row_of]]
            try:
                reorder = search.step(on_host(rows))
            except Exception as error:
                logger.exception("beam search failed")
                failure = ModelFailed(f"beam search failed: {type(error).__name__}")
                failed.update(dict.fromkeys(search.answers, failure))
                continue
            if reorder is None:
                failed.update(dict.fromkeys(search.answers, _not_finite(search.answers[0])))
                continue
            if search.done and self._prefix_cache:
                self._slots.park(search.lead, now_s=self.clock())
            else:
                self._slots.release(reorder.leaving)
            for copy in reorder.copies if search.together else ():
                self._slots.copy(source=copy.source, target=copy.target)
            advanced += search.answers
        return advanced

    def _sample(
        self,
        logits: LogitsArray,
        sampling: Sequence[tuple[int, TokenSequence]],
        failed: dict[Occupant, GenserveError],
    ) -> None:
        if not sampling:
            return
        sequences = [s for _, s in sampling]
        rows = select_rows(logits, [row for row, _ in sampling])
        try:
            picks = pick(rows, sequences, picker=self._picker)
        except Exception as error:
            logger.exception("sampling failed")
            failure = ModelFailed(f"sampling failed: {type(error).__name__}")
            failed.update(dict.fromkeys(sequences, failure))
            return
        for sequence, picked in zip(sequences, picks, strict=True):
            if not picked.finite:
                failed[sequence] = _not_finite(sequence)
                continue
            sequence.take_logprob(picked.logprob)
            sequence.take_surprise(picked.surprise_bits)
            try:
                self._loops.resume(sequence, picked.token_id)
            except GenserveError as error:
                failed[sequence] = error

    def _leave(self, plan: StepPlan, outcome: _Outcome) -> StepResult:
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


def _answering(occupants: Iterable[Occupant]) -> Iterator[Occupant]:
    """Replace beams by the answers of their search."""
    for occupant in occupants:
        if isinstance(occupant, Beam):
            yield from occupant.search.answers
        else:
            yield occupant


def _score(logits: LogitsArray, rows: Iterable[tuple[int, Occupant]]) -> None:
    """Tell those that ask how likely the next token of their prompt is."""
    for row, sequence in rows:
        if isinstance(sequence, TokenSequence) and (token_id := sequence.unscored) is not None:
            num_top = sequence.params.prompt_logprobs or 0
            sequence.add_score(likelihood(logits[row], token_id, num_top=num_top))


def _has_next(sequence: Occupant, tokens: Sequence[int]) -> bool:
    """Whether the first of its tokens that are not computed is the first of these."""
    if isinstance(sequence, TokenSequence) and sequence.finished:
        return False
    return sequence.num_pending > 0 and sequence.token_ids[sequence.num_computed] == next(iter(tokens), None)


def _not_finite(sequence: TokenSequence) -> GenserveError:
    if sequence.plugins.failure is not None:
        return sequence.plugins.failure
    if sequence.grammar is not None and (failure := sequence.grammar.failure):
        message = f"structured_outputs became too much to follow: {failure}"
        return InvalidRequest(message, field="structured_outputs", remedy="ask for a simpler form")
    if sequence.logit_rules is None and sequence.grammar is None:
        return ModelFailed("the model's logits are not finite")
    return ModelFailed(
        "the model's logits are not finite, or what the request forbids leaves no token",
        remedy="forbid less: allowed_token_ids, suppress_tokens, bad_words, min_tokens, no_repeat_ngram_size",
    )
