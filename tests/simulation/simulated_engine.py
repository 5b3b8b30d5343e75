"""Engine of a simulation: the product's, with its invariants checked after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from genserve.engine.engine import Engine, StepResult
from genserve.engine.engine_request import Request, RequestStatus, SequenceGroup
from genserve.engine.speculation import Proposer
from genserve.engine.token_sequence import TokenSequence
from tests.simulation.simulated_logits import VOCAB_SIZE, SimulatedLogits, best_after

# How many steps a request may wait or run without progress: more than all requests of a seed need in turn.
_MAX_STEPS_WITHOUT_PROGRESS = 500


class EngineDied(Exception):
    """A defect of the engine that was injected."""


class GreedyDrafts(Proposer):
    """Drafts the best tokens, with errors; fails once if it is told to."""

    def __init__(self, rng: Random, *, error_rate: float, failure_rate: float) -> None:
        self._rng = rng
        self._error_rate = error_rate
        self._failure_rate = failure_rate
        self.known: set[int] = set()

    def propose(self, request: Request, count: int) -> Sequence[int]:
        self.known.add(id(request))
        if self._rng.random() < self._failure_rate:
            raise EngineDied("injected")
        token_ids = list(request.token_ids)
        for _ in range(count):
            errs = self._rng.random() < self._error_rate
            token_ids.append(self._rng.randrange(VOCAB_SIZE) if errs else best_after(token_ids))
        return token_ids[len(request.token_ids) :]

    def drop(self, request: Request) -> None:
        self.known.discard(id(request))


class SimulatedEngine(Engine):
    """Checks its requests and blocks after every step; `report` is called with what is wrong."""

    def __init__(
        self,
        model: SimulatedLogits,
        *,
        report: Callable[[str], None],
        dies_at_step: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.model = model
        self.num_steps = 0
        self.num_preempted = 0
        self._report = report
        self._dies_at_step = dies_at_step
        self._progress: dict[SequenceGroup, tuple[object, int]] = {}  # last change, and its step
        self._known: list[TokenSequence] = []    # sequences that came, and may have left

    def add(self, sequence: TokenSequence) -> None:
        self._known.append(sequence)
        super().add(sequence)

    def step(self) -> StepResult | None:
        self.num_steps += 1
        if self.num_steps == self._dies_at_step:
            raise EngineDied("injected")
        waiting, running = tuple(self._scheduler.waiting), tuple(self._scheduler.running)
        result = super().step()
        try:
            self.check_integrity()
            self._check_left()
            self.check_contents()
            if result is not None:
                self.num_preempted += result.num_preempted
                self._check_order(waiting, running, result)
                self._check_deadlines()
                self._check_progress()
        except AssertionError as error:
            self._report(f"after step {self.num_steps}: {error}")
        return result

    @property
    def is_empty(self) -> bool:
        """Whether nothing of any request is left."""
        drafts = self._speculation
        return not (
            self.num_running
            or self.num_waiting
            or self.cache_usage
            or self.state_usage
            or any(sequence.loop is not None for sequence in self._known)
            or (drafts is not None and (drafts._sequences or getattr(drafts._proposer, "known", ())))
        )

    def _check_left(self) -> None:
        """Check that sequences that have left hold nothing, and forget them."""
        left = [s for s in self._known if s.group.status is RequestStatus.FINISHED]
        assert all(s.loop is None for s in left), "a loop outlived its sequence"
        assert not any(s.block_table.block_ids for s in left), "blocks outlived their sequence"
        self._known = [s for s in self._known if s.group.status is not RequestStatus.FINISHED]

    def check_contents(self) -> None:
        """Check that each request's blocks have its tokens, shared blocks included."""
        for request in (request for group in self._scheduler.running for request in group.requests):
            block_ids, num_computed = request.block_table.block_ids, request.num_computed_tokens
            if num_computed:
                num_blocks = self._kv.num_blocks_for(num_computed)
                tokens = request.token_ids[:num_computed]
                assert self.model.holds(block_ids[:num_blocks], tokens), (
                    "a block of a request holds other tokens"
                )
                state = request.block_table.state
                assert state is None or self.model.holds_state(state.slot, tokens), (
                    "a state is behind other tokens"
                )

    def _check_order(
        self, waiting: Sequence[SequenceGroup], running: Sequence[SequenceGroup], result: StepResult
    ) -> None:
        """Check that no request starts before one of higher priority, unless that one awaits a prefix."""
        started = {choice.group for choice in result.started}
        worst = max((group.priority for group in started), default=None)
        if worst is None:
            return
        computing = [group.requests[0] for group in (*running, *started)]
        for group in waiting:
            is_waiting = group in self._scheduler.waiting
            if group.priority < worst and group not in started and is_waiting:
                first = group.requests[0]
                shares = any(
                    other.cache_salt == first.cache_salt
                    and other.token_ids[: self._kv.block_size] == first.token_ids[: self._kv.block_size]
                    for other in computing
                )
                assert shares, "a request started before one of higher priority"

    def _check_deadlines(self) -> None:
        now_s = self.clock()
        assert not any(sequence.is_expired(now_s) for sequence in self._known), "a deadline was missed"

    def _check_progress(self) -> None:
        """Check that each request changes at least once in so many steps."""
        before, self._progress = self._progress, {}
        for group in (*self._scheduler.waiting, *self._scheduler.running):
            state = [(r.num_computed_tokens, r.num_preemptions, len(r.token_ids)) for r in group.requests]
            known = before.get(group)
            is_same = known is not None and known[0] == state
            self._progress[group] = known if known is not None and is_same else (state, self.num_steps)
            stalled = self.num_steps - self._progress[group][1]
            assert stalled <= _MAX_STEPS_WITHOUT_PROGRESS, f"a request made no progress in {stalled} steps"
