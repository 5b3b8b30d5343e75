"""Simulated replica: the queue, admission control, scheduler and KV cache of an engine, without a model.

Everything that decides is the engine's own code. Only the clock is virtual: a step takes as long as the
step model says.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

import numpy as np

from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.engine.admission_control import AdmissionControl, QueueLimits
from genserve.engine.engine_request import SubmittedSequence
from genserve.engine.input_queue import InputQueue
from genserve.engine.kv_cache_manager import KVCacheManager
from genserve.engine.scheduler import Scheduler, SchedulerOutput
from genserve.generation_metrics import Metrics
from genserve.planner.loads import PlannedRequest
from genserve.planner.step_model import StepModel
from genserve.tuning.measured_steps import EngineLimits, ServingCost, StepSize

_num_computed_tokens = attrgetter("num_computed_tokens")
_REMEMBERED_STEPS = 32      # earlier ones have no weight in the scheduler's moving averages
_BINS = 200     # bins of times per factor of e: a bin is half a percent wide


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaKind:
    """The properties that all replicas of a fleet share."""

    limits: EngineLimits
    step_model: StepModel
    serving: ServingCost
    queue_limits: QueueLimits


class SimulatedSequence(SubmittedSequence):
    """A planned request in the engine; its answer has a known length, and no text.

    Attributes:
        planned: the request as the load has it.
        first_id: a token of the answer has this id plus the token's index in prompt and answer.
        num_left: tokens of the answer that are still to be generated.
        last_token_s: when its last token so far was generated; None: it has no token.
    """

    __slots__ = ("first_id", "last_token_s", "num_left", "planned")

    def __init__(self, planned: PlannedRequest, token_ids: Sequence[int]) -> None:
        super().__init__(token_ids)
        self.planned = planned
        self.first_id = planned.answer.start - len(token_ids)
        self.num_left = len(planned.answer)
        self.last_token_s: float | None = None

    def generate(self, count: int) -> None:
        """Append the next tokens of the answer."""
        first = self.first_id + len(self.token_ids)
        self.token_ids.extend(range(first, first + count))
        self.num_left -= count


class SimulatedReplica:
    """An engine on a virtual clock. `begin` starts a step, `end` completes it at `ends_s`.

    While all sequences decode and none waits, the scheduler has nothing to decide: the steps up to the end of
    the next sequence are simulated as one. An arrival cuts them at the end of the step that it falls into.

    Attributes:
        ends_s: when the current step ends; infinite: there is none.
        times: the times of the tokens that were generated.
        busy_s: the time of all steps.
    """

    def __init__(self, kind: ReplicaKind, *, clock: Callable[[], float]) -> None:
        limits = kind.limits
        admission = AdmissionControl(
            max_num_seqs=limits.max_num_seqs,
            limits=kind.queue_limits,
            metrics=Metrics().for_model("simulated"),
        )
        self._clock = clock
        self._queue: InputQueue[SimulatedSequence] = InputQueue(clock=clock, admission=admission)
        self.ends_s = math.inf
        self.times = TokenTimes()
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_preempted = 0
        self._kind = kind
        self._model = kind.step_model
        self._kv = KVCacheManager(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            num_state_slots=limits.num_state_slots,
        )
        self._scheduler = Scheduler(
            self._kv, max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens
        )
        self._open: dict[SimulatedSequence, None] = {}      # the sequences in the scheduler
        self._output: SchedulerOutput | None = None
        self._began_s = 0.0
        self._step_s = 0.0          # the first step, in the engine alone
        self._growth_s = 0.0        # how much longer each further step is
        self._sending_s = 0.0       # how much serving lengthens each step
        self._count = 1             # how many steps are simulated as one
        self._full_before = False   # a step was full, and the queue has not been empty since

    @property
    def load(self) -> ReplicaLoad:
        """The load, as the router reads it."""
        counts = self._queue.admission
        return ReplicaLoad(
            running=counts.num_accepted - counts.num_waiting,
            waiting=counts.num_waiting,
            waiting_tokens=counts.num_waiting_tokens,
            kv_usage=self._kv.usage,
            num_free=self._queue.num_free,
        )

    def receive(self, planned: PlannedRequest, token_ids: Sequence[int], *, keys: Sequence[bytes]) -> None:
        """Queue a request for the next step.

        `keys` are the keys of its full blocks, if they are known.

        Raises:
            Overloaded: admission control rejects the request.
        """
        sequence = SimulatedSequence(planned, token_ids)
        reservation = self._queue.reserve(1)
        reservation.arrived_s = planned.arrived_s
        self._queue.submit([sequence], reservation=reservation)
        if keys:
            sequence.block_table.keys = list(keys)
        if self._output is not None:
            self._cut(self._clock())
            self.ends_s += self._kind.serving.busy_s
            self.busy_s += self._kind.serving.busy_s

    def begin(self) -> None:
        """Start a step; without requests, or if none can run, `ends_s` is infinite."""
        for sequence in self._queue.pop().sequences:
            self._open[sequence] = None
            self._scheduler.add(sequence)
        now_s = self._clock()
        output = self._output = self._scheduler.schedule()
        if output is None:
            self.ends_s = math.inf
            return
        self._began_s, self._count = now_s, 1
        size = self._size(output)
        self._step_s = self._model.seconds(size)
        self._growth_s = self._model.context_token_s * size.decodes
        serving = self._kind.serving
        self._sending_s = serving.step_s + serving.token_s * size.rows
        if not (output.num_prompt_tokens or output.full or self._full_before):
            self._count = self._num_uniform_steps(output, now_s=now_s)
        self.ends_s = now_s + self._duration_s(self._count)

    def end(self) -> list[SimulatedSequence]:
        """Complete the step; return the sequences that have ended with it."""
        output, now_s, count = self._output, self._clock(), self._count
        assert output is not None
        self.num_steps += count
        self.num_preempted += output.num_preempted
        duration_s = self._duration_s(count)
        self.busy_s += duration_s
        # The tokens of a step are sent while the next one runs, so the engine measures that too.
        first_s = self._step_s + self._sending_s
        for index in range(max(0, count - _REMEMBERED_STEPS), count):
            self._scheduler.record_step(output, first_s + index * self._growth_s)
        if count > 1:
            last_s = first_s + (count - 1) * self._growth_s
            self.times.add_gaps(first_s, last_s, count * len(output.requests))
        ended = self._advance(output, count, now_s=now_s)
        if output.started or output.full or self._full_before:
            # Several steps at once never started or queued a request.
            self._queue.record_step(
                [request for group in output.started for request in group.requests],
                seconds=now_s - self._began_s,
                full=output.full,
                num_waiting=self._scheduler.num_waiting,
                now_s=now_s,
            )
        self._full_before = output.full or (self._full_before and self._scheduler.num_waiting > 0)
        for sequence in ended:
            self._remove(sequence)
        self._output = None
        return ended

    def reject_overdue(self) -> list[SimulatedSequence]:
        """Remove the sequences that have waited too long for their first step, and return them."""
        overdue = [sequence for sequence, _ in self._queue.overdue(self._open)]
        for sequence in overdue:
            self._remove(sequence)
        return overdue

    def _remove(self, sequence: SimulatedSequence) -> None:
        self._scheduler.remove(sequence)
        del self._open[sequence]
        self._queue.remove(sequence)

    def _size(self, output: SchedulerOutput) -> StepSize:
        """Return the size of a step."""
        requests, num_decodes = output.requests, output.num_decodes
        num_pairs, num_rows = 0, num_decodes
        for request, count in zip(requests[num_decodes:], output.num_tokens[num_decodes:], strict=True):
            num_pairs += count * request.num_computed_tokens + count * (count + 1) // 2
            num_rows += count == request.num_pending
        return StepSize(
            decodes=num_decodes,
            context_tokens=sum(map(_num_computed_tokens, requests[:num_decodes])),
            prompt_tokens=output.num_prompt_tokens,
            prompt_pairs=num_pairs,
            rows=num_rows,
        )

    def _num_uniform_steps(self, output: SchedulerOutput, *, now_s: float) -> int:
        """Return for how many steps the same sequences each get a token, if no request arrives."""
        sequences = cast("list[SimulatedSequence]", output.requests)
        if any(sequence.last_token_s != now_s for sequence in sequences):
            return 1    # one of them has its first token now, or was preempted
        # A sequence needs at most one block more than it fills.
        num_fitting = (self._kv.num_free_blocks // len(sequences) - 1) * self._kv.block_size
        return max(1, min(num_fitting, *(sequence.num_left for sequence in sequences)))

    def _duration_s(self, count: int) -> float:
        """Return how long `count` of the steps take together."""
        return count * (self._step_s + self._sending_s) + self._growth_s * (count * (count - 1) / 2)

    def _cut(self, now_s: float) -> None:
        """End the steps with the one in which `now_s` falls."""
        if self._count == 1:
            return
        least, most = 1, self._count
        while least < most:
            middle = (least + most) // 2
            if self._began_s + self._duration_s(middle) < now_s:
                least = middle + 1
            else:
                most = middle
        self._count = least
        self.ends_s = self._began_s + self._duration_s(least)

    def _advance(self, output: SchedulerOutput, count: int, *, now_s: float) -> list[SimulatedSequence]:
        """Compute the tokens of the step, and generate the next token of each complete sequence."""
        kv, block_size = self._kv, self._kv.block_size
        gaps: dict[float, int] = {}     # sequences by the time of their last token: most have the same
        ended: list[SimulatedSequence] = []
        sequences = cast("list[SimulatedSequence]", output.requests)
        for sequence, num_tokens in zip(sequences, output.num_tokens, strict=True):
            token_ids = sequence.token_ids
            if count > 1:
                kv.extend(sequence, count)
                sequence.generate(count - 1)
                num_tokens = count
            computed = sequence.num_computed_tokens = sequence.num_computed_tokens + num_tokens
            if computed % block_size < num_tokens or kv.has_states:
                kv.cache_blocks(sequence)
            if computed < len(token_ids):
                continue
            last_s = sequence.last_token_s
            if last_s is None:
                self.times.add_first(now_s - sequence.planned.arrived_s)
            else:
                gaps[last_s] = gaps.get(last_s, 0) + 1
            sequence.last_token_s = now_s
            token_ids.append(sequence.first_id + len(token_ids))
            sequence.num_left -= 1
            if not sequence.num_left:
                ended.append(sequence)
        if count == 1:
            for last_s, num_sequences in gaps.items():
                self.times.add_gap(now_s - last_s, num_sequences)
        return ended


class TokenTimes:
    """Times to first tokens, and times between tokens.

    Attributes:
        firsts_s: each time to a first token.
        gaps: the numbers of times between tokens, by bins of half a percent.
    """

    def __init__(self) -> None:
        self.firsts_s = array("d")
        self.gaps: Counter[int] = Counter()

    def add_first(self, seconds: float) -> None:
        """Add the time from the arrival of a request to its first token."""
        self.firsts_s.append(seconds)

    def add_gap(self, seconds: float, count: int) -> None:
        """Add `count` equal times between two tokens of an answer."""
        self.gaps[_bin(seconds)] += count

    def add_gaps(self, first_s: float, last_s: float, count: int) -> None:
        """Add `count` times between two tokens, spread evenly from the first to the last."""
        if count == 1 or _bin(first_s) == _bin(last_s):
            self.gaps[_bin(first_s)] += count
            return
        middle_s, num_lower = (first_s + last_s) / 2, count // 2
        self.add_gaps(first_s, middle_s, num_lower)
        self.add_gaps(middle_s, last_s, count - num_lower)

    def merge(self, others: Iterable[TokenTimes]) -> None:
        """Add all times of `others`."""
        for other in others:
            self.firsts_s.extend(other.firsts_s)
            self.gaps.update(other.gaps)

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return len(self.firsts_s) + self.gaps.total()

    def first_s(self, rank: float) -> float:
        """Return a percentile of the times to the first token; NaN: there is none."""
        return float(np.percentile(self.firsts_s, rank)) if self.firsts_s else math.nan

    def gap_s(self, rank: float) -> float:
        """Return a percentile of the times between tokens; NaN: there is none."""
        if not self.gaps:
            return math.nan
        bins = sorted(self.gaps)
        reached = np.cumsum([self.gaps[index] for index in bins])
        index = int(np.searchsorted(reached, rank / 100 * reached[-1]))
        return math.exp((bins[min(index, len(bins) - 1)] + 0.5) / _BINS)


def _bin(seconds: float) -> int:
    return math.floor(math.log(seconds) * _BINS)
