"""Inference statistics: counts and durations of one version of a model, as Triton reports them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from genserve.errors import GenserveError, InferenceError, Overloaded, Status
from genserve.histogram import Histogram
from genserve.inference import Inference


class FailureReason(StrEnum):
    """Why a request failed; the label of `nv_inference_request_failure`."""

    REJECTED = "REJECTED"       # timed out in the queue; as in Triton, a full queue does not count
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"         # the model failed
    OTHER = "OTHER"             # a step of an ensemble failed


@dataclass(slots=True)
class DurationStat:
    """A count of events and their total duration."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, *, count: int = 1) -> None:
        """Add `count` events that took `ns` together."""
        self.count += count
        self.ns += ns


@dataclass(slots=True, eq=False)
class BatchStatistics:
    """The executions of one batch size, or of all."""

    compute_infer: DurationStat = field(default_factory=DurationStat)

    @property
    def compute_input(self) -> DurationStat:
        """The count of `compute_infer`, without duration: inputs are passed on as they are."""
        return DurationStat(self.compute_infer.count)

    @property
    def compute_output(self) -> DurationStat:
        """The count of `compute_infer`, without duration: outputs are passed on as they are."""
        return DurationStat(self.compute_infer.count)


class ModelStatistics(BatchStatistics):
    """Counts of one version of a model; its methods are safe from any thread.

    Attributes, read by the protocols (see `InferStatistics` of the KServe v2 extensions):
        inference_count: rows executed successfully.
        execution_count: executed batches.
        last_inference_ms: wall-clock time of the last request, milliseconds since 1970.
        success, fail, queue, compute_input, compute_infer, compute_output, cache_hit, cache_miss.
        batches: the executions by their number of rows.
        failures: requests that failed, by reason.
        first_response: milliseconds from the request to its first response; None: not measured.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.success = DurationStat()
        self.fail = DurationStat()
        self.queue = DurationStat()
        self.cache_hit = DurationStat()
        self.cache_miss = DurationStat()
        self.batches: defaultdict[int, BatchStatistics] = defaultdict(BatchStatistics)
        self.first_response: Histogram | None = None
        self.failures: dict[FailureReason, int] = dict.fromkeys(FailureReason, 0)

    def __getstate__(self) -> dict[str, object]:
        """Return a copy of the counts, for another process."""
        with self._lock:
            state = {name: value for name, value in vars(self).items() if name != "_lock"}
            return state | {
                "compute_infer": self.compute_infer,
                "batches": self.batches.copy(),
                "failures": self.failures.copy(),
            }

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._lock = threading.Lock()

    def add(self, other: ModelStatistics) -> None:
        """Add the counts of another replica of the version.

        The other replica's histogram is left out if it has other buckets, as after a change of the config.
        """
        with self._lock:
            self.inference_count += other.inference_count
            self.execution_count += other.execution_count
            self.last_inference_ms = max(self.last_inference_ms, other.last_inference_ms)
            for name in ("compute_infer", "success", "fail", "queue", "cache_hit", "cache_miss"):
                counted: DurationStat = getattr(other, name)
                getattr(self, name).add(counted.ns, count=counted.count)
            for size, batch in other.batches.items():
                self.batches[size].compute_infer.add(
                    batch.compute_infer.ns, count=batch.compute_infer.count
                )
            for reason, count in other.failures.items():
                self.failures[reason] += count
            ours, theirs = self.first_response, other.first_response
            if ours is not None and theirs is not None and ours.bounds == theirs.bounds:
                ours.add(theirs)

    def executed(self, batch: Sequence[Inference], *, started_ns: int, ended_ns: int) -> None:
        """Count an execution, whether its requests have ended or not."""
        size = batch[0].batch_size if len(batch) == 1 else sum(one.batch_size for one in batch)
        with self._lock:
            self.execution_count += 1
            self.batches[size].compute_infer.add(ended_ns - started_ns)

    def executed_alone(self, inference: Inference) -> None:
        """Count the execution of a request by a runtime without batches: an ensemble, an engine."""
        self.executed((inference,), started_ns=inference.started_ns, ended_ns=time.monotonic_ns())

    def ended(self, inference: Inference) -> None:
        """Count the end of an accepted request."""
        error = inference.error
        now_ns = time.monotonic_ns()
        total_ns = now_ns - inference.submitted_ns
        with self._lock:
            self.last_inference_ms = time.time_ns() // 1_000_000
            if error is not None:
                self.fail.add(total_ns)
                self.failures[_reason(inference, error)] += 1
                return
            self.success.add(total_ns)
            self.inference_count += inference.batch_size
            self.queue.add(inference.started_ns - inference.submitted_ns)
            self.compute_infer.add(now_ns - inference.started_ns)

    def cache_hit_ended(self, inference: Inference, *, lookup_ns: int) -> None:
        """Count a request that the response cache answered."""
        with self._lock:
            self.last_inference_ms = time.time_ns() // 1_000_000
            self.success.add(time.monotonic_ns() - inference.submitted_ns)
            self.queue.add(0)
            self.cache_hit.add(lookup_ns)

    def cache_missed(self, *, lookup_and_insert_ns: int) -> None:
        """Count a request that the response cache did not have."""
        with self._lock:
            self.cache_miss.add(lookup_and_insert_ns)


def _reason(inference: Inference, error: GenserveError) -> FailureReason:
    if inference.cancelled or (isinstance(error, InferenceError) and error.status is Status.CANCELLED):
        return FailureReason.CANCELED
    if inference.parts:
        return FailureReason.OTHER  # for an ensemble; its step has the reason
    if not inference.started_ns or isinstance(error, Overloaded):   # an engine has a queue of its own
        return FailureReason.REJECTED
    return FailureReason.BACKEND
