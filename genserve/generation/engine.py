"""Engine: one step is plan, forward, pick and commit, over all running token sequences."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from genserve.errors import GenserveError, ModelFailed
from genserve.generation.decoding_loops import DecodeFunction, DecodingLoops
from genserve.generation.logits_model import FloatArray, LogitsModel
from genserve.generation.pick import pick
from genserve.generation.planner import Decode, Prefill, PrefillBudget, StepPlan, plan_step
from genserve.generation.sampler import select_rows
from genserve.generation.slots import Slots
from genserve.generation.token_sequence import TokenSequence, Want

__all__ = ["Engine", "StepResult"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    advanced: tuple[TokenSequence, ...]                 # each has a delta to take; some have finished
    failed: dict[TokenSequence, GenserveError]          # these have left without finishing
    num_prompt_tokens: int                              # tokens that a prefill ran; 0: it was a decode


class Engine:
    """Continuous batching over the slots of one logits model. One thread owns it."""

    def __init__(
        self, model: LogitsModel, *, decode: DecodeFunction, budget: PrefillBudget | None = None
    ) -> None:
        self._model = model
        self._slots = Slots(model)
        self._loops = DecodingLoops(decode)
        self._budget = budget or PrefillBudget()
        self._waiting: deque[TokenSequence] = deque()
        self._prefilled_last = False

    @property
    def num_waiting(self) -> int:
        """Token sequences that wait for a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Token sequences that hold a slot."""
        return len(self._slots.running)

    def add(self, sequence: TokenSequence) -> None:
        """Put a token sequence at the end of the waiting line."""
        self._waiting.append(sequence)

    def remove(self, sequences: Iterable[TokenSequence]) -> None:
        """Drop token sequences, wherever they are; their slots are free at once."""
        leaving = set(sequences)
        if not leaving:
            return
        self._waiting = deque(s for s in self._waiting if s not in leaving)
        for sequence in leaving:
            self._loops.drop(sequence)
        self._slots.release(leaving)

    def step(self) -> StepResult | None:
        """Run one forward and commit what it gives; None if there was nothing to do."""
        plan = plan_step(
            self._slots.running,
            waiting=list(islice(self._waiting, self._model.num_slots)),
            num_slots=self._model.num_slots,
            prefilled_last=self._prefilled_last,
            budget=self._budget,
        )
        if plan is None:
            return None
        self._prefilled_last = isinstance(plan, Prefill)
        if isinstance(plan, Prefill):
            self._slots.take(self._waiting.popleft() for _ in range(plan.num_admitted))
        try:
            logits = self._forward(plan)
        except Exception as error:
            logger.exception("forward failed")
            failure = ModelFailed(f"the model's forward failed: {type(error).__name__}")
            return self._leave((), dict.fromkeys(plan.sequences, failure), plan)
        return self._commit(plan, logits)

    def check_integrity(self) -> None:
        """Raise AssertionError where slots and loops disagree; for tests."""
        self._slots.check_integrity()
        assert len(self._loops) <= self.num_running, "a loop outlived its sequence"
        assert all(s.num_pending >= 1 for s in self._slots.running), "a sequence runs with nothing to compute"

    def _forward(self, plan: StepPlan) -> FloatArray:
        """Run the plan; the only place where `num_computed` grows."""
        match plan:
            case Prefill():
                past = plan.sequences[0].num_computed
                chunks = [
                    s.token_ids[past : past + n] for s, n in zip(plan.sequences, plan.num_tokens, strict=True)
                ]
                logits = self._model.prefill(chunks, first_slot=plan.first_slot, past=past)
                for sequence, count in zip(plan.sequences, plan.num_tokens, strict=True):
                    sequence.num_computed += count
            case Decode():
                past_lengths = np.array([s.num_computed for s in plan.sequences], dtype=np.int64)
                token_ids = np.array([s.token_ids[s.num_computed] for s in plan.sequences], dtype=np.int64)
                logits = self._model.decode(token_ids, past_lengths)
                for sequence in plan.sequences:
                    sequence.num_computed += 1
        return logits

    def _commit(self, plan: StepPlan, logits: FloatArray) -> StepResult:
        """Give each sequence that is fully computed its token or its row."""
        ready = [(row, s) for row, s in enumerate(plan.sequences) if s.num_pending == 0]
        failed: dict[TokenSequence, GenserveError] = {}
        sampling: list[tuple[int, TokenSequence]] = []
        for row, sequence in ready:
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
        return self._leave([s for _, s in ready], failed, plan)

    def _sample(
        self,
        logits: FloatArray,
        sampling: Sequence[tuple[int, TokenSequence]],
        failed: dict[TokenSequence, GenserveError],
    ) -> None:
        if not sampling:
            return
        sequences = [s for _, s in sampling]
        rows = select_rows(logits, [row for row, _ in sampling])
        try:
            picks = pick(rows, sequences)
        except Exception as error:
            logger.exception("sampling failed")
            failure = ModelFailed(f"sampling failed: {type(error).__name__}")
            failed.update(dict.fromkeys(sequences, failure))
            return
        for sequence, picked in zip(sequences, picks, strict=True):
            if not picked.finite:
                failed[sequence] = ModelFailed("the model's logits are not finite")
                continue
            sequence.picked_logprob = picked.logprob
            try:
                self._loops.resume(sequence, picked.token_id)
            except GenserveError as error:
                failed[sequence] = error

    def _leave(
        self, ready: Iterable[TokenSequence], failed: dict[TokenSequence, GenserveError], plan: StepPlan
    ) -> StepResult:
        """Let go of those that finished or failed."""
        advanced = tuple(s for s in ready if s not in failed)
        self.remove([*failed, *(s for s in advanced if s.finished)])
        prompt_tokens = sum(plan.num_tokens) if isinstance(plan, Prefill) else 0
        return StepResult(advanced=advanced, failed=failed, num_prompt_tokens=prompt_tokens)
