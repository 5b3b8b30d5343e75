"""Engine: one step is plan, forward, pick and commit, over all running token sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from genserve.errors import GenserveError, ModelFailed
from genserve.generation.beam_group import Beam
from genserve.generation.decoding_loops import DecodeFunction, DecodingLoops
from genserve.generation.likelihood import likelihood
from genserve.generation.logits_model import LogitsArray, LogitsModel
from genserve.generation.logits_request import LogitsRequest
from genserve.generation.parked import hold_s
from genserve.generation.pick import RowPicker, pick
from genserve.generation.planner import Decode, Prefill, PrefillBudget, StepPlan
from genserve.generation.roster import Roster
from genserve.generation.sampler import pick_rows, select_rows
from genserve.generation.slots import Occupant, Slots
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing to do.

        Args:
            model: computes the logits.
            decode: the decoding loop of each token sequence.
            budget: of a prefill.
            picker: of the model's logits.
            prefix_cache: whether token sequences share what they begin with; logits requests always do.
            clock: seconds.
        """
        self._model = model
        self.clock = clock
        self._slots = Slots(model)
        self._roster = Roster(self._slots, budget=budget or PrefillBudget(), prefix_cache=prefix_cache)
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
        """Put it at the end of the waiting line, or where all but the last of its tokens are known.

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
            return self._leave((), (), dict.fromkeys(_answering(plan.sequences), failure), plan)
        return self._commit(plan, logits, rows)

    def check_integrity(self) -> None:
        """Raise AssertionError where slots and loops disagree; for tests."""
        self._slots.check_integrity()
        assert len(self._loops) <= self.num_running + self.num_waiting, "a loop outlived its sequence"
        assert all(s.num_pending >= 1 for s in self._slots.running), "a sequence runs with nothing to compute"

    def _forward(self, plan: StepPlan) -> tuple[LogitsArray, Sequence[int]]:
        """Run the plan; returns the logits, and the row of each of its sequences."""
        slots = self._slots.of(plan.sequences)
        match plan:
            case Prefill():
                past = plan.sequences[0].num_computed
                chunks = [
                    s.token_ids[past : past + n] for s, n in zip(plan.sequences, plan.num_tokens, strict=True)
                ]
                logits = self._model.prefill(chunks, first_slot=slots[0], past=past)
                counts, rows = plan.num_tokens, list(range(len(slots)))
            case Decode():
                logits = self._decode(plan.sequences, slots)
                counts, rows = (1,) * len(slots), slots
        for sequence, count in zip(plan.sequences, counts, strict=True):
            if isinstance(plan, Prefill) and sequence.num_prefilled == sequence.num_computed:
                sequence.num_prefilled += count
            sequence.num_computed += count
        return logits, rows

    def _decode(self, sequences: Sequence[Occupant], slots: Sequence[int]) -> LogitsArray:
        """Run one token of each sequence; a slot between them that has none gets an idle row.

        An idle row writes behind what its slot holds, where the next tokens overwrite it.
        """
        residents = self._slots.residents[: max(slots) + 1]
        past_lengths = np.array([r.num_computed if r else 0 for r in residents], dtype=np.int64)
        token_ids = np.zeros(len(residents), dtype=np.int64)
        token_ids[slots] = [s.token_ids[s.num_computed] for s in sequences]
        return self._model.decode(token_ids, past_lengths)

    def _commit(self, plan: StepPlan, logits: LogitsArray, rows: Sequence[int]) -> StepResult:
        """Give each that is fully computed its token or its row."""
        ready = [(row, s) for row, s in zip(rows, plan.sequences, strict=True) if s.num_pending == 0]
        asking = [(row, s) for row, s in ready if isinstance(s, LogitsRequest)]
        # To index with a list is to copy, for numpy and for torch: the buffer is the next step's.
        rows_asked = logits[[row for row, _ in asking]] if asking else ()
        answered = [(s, row) for (_, s), row in zip(asking, rows_asked, strict=True)]
        _score(logits, zip(rows, plan.sequences, strict=True))
        generating = [(row, s) for row, s in ready if isinstance(s, TokenSequence)]
        failed: dict[Occupant, GenserveError] = {}
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
        return self._leave([*(s for _, s in generating), *searched], answered, failed, plan)

    def _search(
        self, logits: LogitsArray, row_of: Mapping[Beam, int], failed: dict[Occupant, GenserveError]
    ) -> list[TokenSequence]:
        """Move each beam search by one token; returns the answers."""
        advanced: list[TokenSequence] = []
        for group in dict.fromkeys(beam.group for beam in row_of):
            rows = logits[[row_of[beam] for beam in group.beams if beam in row_of]]
            copies = group.step(np.asarray(rows.cpu() if hasattr(rows, "cpu") else rows))
            if copies is None:
                failed.update(dict.fromkeys(group.answers, _not_finite(group.answers[0])))
            elif group.done and self._prefix_cache:
                self._slots.park(group.lead, now_s=self.clock())
            elif group.together:
                for copy in copies:
                    self._slots.copy(source=copy.source, target=copy.target)
            advanced += group.answers
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

    def _leave(
        self,
        ready: Iterable[TokenSequence],
        answered: Iterable[tuple[LogitsRequest, LogitsArray]],
        failed: dict[Occupant, GenserveError],
        plan: StepPlan,
    ) -> StepResult:
        """Let go of those that failed, and park what those have computed that finished or are answered.

        Those whose time is over end here, even if they still wait.
        """
        advanced = tuple(s for s in ready if s not in failed)
        now_s = self.clock()
        late = [s for s in self._timed if s.is_late(now_s) and s not in failed]
        for sequence in late:
            if sequence.beams is not None:
                sequence.beams.settle()
            if not sequence.finished:
                sequence.finish(FinishReason.LENGTH, stop_reason="deadline")
        finished = [s for s in advanced if s.finished]
        if self._prefix_cache:
            for sequence in finished:
                if sequence.beams is None:
                    self._slots.park(sequence, now_s=now_s)
        self.remove([*failed, *finished, *late])
        for request, _ in answered:
            held_s = hold_s(request.pause_s, step_s=now_s - self._step_started_s)
            self._slots.park(request, now_s=now_s, held_s=held_s)
        prompt_tokens = sum(plan.num_tokens) if isinstance(plan, Prefill) else 0
        return StepResult(
            advanced=(*advanced, *(s for s in late if s not in advanced)),
            answered=tuple(answered),
            failed=failed,
            num_prompt_tokens=prompt_tokens,
            num_preempted=self._roster.num_preempted,
        )


def _answering(occupants: Iterable[Occupant]) -> Iterator[Occupant]:
    """Replace beams by the answers of their search."""
    for occupant in occupants:
        if isinstance(occupant, Beam):
            yield from occupant.group.answers
        else:
            yield occupant


def _score(logits: LogitsArray, rows: Iterable[tuple[int, Occupant]]) -> None:
    """Tell those that ask how likely the next token of their prompt is."""
    for row, sequence in rows:
        if isinstance(sequence, TokenSequence) and (token_id := sequence.unscored) is not None:
            num_top = sequence.params.prompt_logprobs or 0
            sequence.add_score(likelihood(logits[row], token_id, num_top=num_top))


def _not_finite(sequence: TokenSequence) -> GenserveError:
    if sequence.plugins.failure is not None:
        return sequence.plugins.failure
    if sequence.logit_rules is None:
        return ModelFailed("the model's logits are not finite")
    return ModelFailed(
        "the model's logits are not finite, or what the request forbids leaves no token",
        remedy="forbid less: allowed_token_ids, suppress_tokens, bad_words, min_tokens, no_repeat_ngram_size",
    )
