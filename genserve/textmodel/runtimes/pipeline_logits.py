"""Pipeline logits: a model in several graphs, each with a part of the layers, on a device of its own.

The tokens of a forward are divided into micro-batches. While a stage computes one, the stage before it
computes the next:

    stage 1    | 1 | 2 | 3 |
    stage 2        | 1 | 2 | 3 |

A stage computes the micro-batches in their order, so that one may continue a sequence of the one before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

from genserve.engine.logits_model import ForwardBatch
from genserve.errors import RepositoryError
from genserve.machine import default_threads
from genserve.sampling.logits_array import LogitsArray
from genserve.textmodel.runtimes.cached_logits import (
    EXPORT_AGAIN,
    CachedLogits,
    CachePart,
    CacheSizes,
    tokens_of,
)
from genserve.textmodel.runtimes.kv_cache_memory import HostMemory, LogitsMemory
from genserve.textmodel.runtimes.onnx_logits import LogitsGraph, check_written_cache, exported_context_length

logger = logging.getLogger(__name__)

_MEASURED_TOKENS = 32  # a forward of so many tokens is compared with a forward of one
_MAX_MICRO_BATCHES = 16
# The cost of a micro-batch besides the runs of its stages: two threads wake each other.
_HANDOVER_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The time that a stage takes: what every run costs, and each of its tokens."""

    run_s: float
    token_s: float


@lru_cache(4096)
def num_micro_batches(costs: tuple[StageCost, ...], num_tokens: int) -> int:
    """Return into how many micro-batches a forward is divided, so that it takes the least time.

    With m micro-batches the first passes all stages, and the other m - 1 follow it at the pace of the
    slowest stage. Each micro-batch is another run of every stage, which reads all its weights again.
    """

    def duration_s(number: int) -> float:
        times_s = [cost.run_s + cost.token_s * num_tokens / number for cost in costs]
        return sum(times_s) + (number - 1) * (max(times_s) + _HANDOVER_S)

    return min(range(1, min(num_tokens, _MAX_MICRO_BATCHES) + 1), key=duration_s)


class PipelineLogits(CachedLogits):
    """A pipeline of logits graphs; implements `engine.LogitsModel`. Used by one thread.

    Each stage but the last has a thread, until `close` or the last reference to the pipeline is gone; the
    last stage runs on the thread of the caller. ONNX Runtime does not hold the interpreter's lock in a run.

    Attributes:
        graphs: the graphs in order.
        metadata: the metadata that the exporter has written into the first graph.
        vocab_size: see `LogitsModel.vocab_size`.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        num_threads: int | None = None,
        memories: Sequence[LogitsMemory] | None = None,
        max_micro_batch: int | None = None,
        **sizes: Unpack[CacheSizes],
    ) -> None:
        """Load the graphs, and measure what their runs cost.

        Args:
            paths: the graphs in order, with their weights in the same folder.
            num_threads: threads of each stage; None or 0: the stages share the cores of this process.
            memories: the memory of each stage's device; None: the host's. The last one has the logits too.
            max_micro_batch: maximum tokens of a micro-batch; None: by the measured costs.
            sizes: the bounds of the KV cache of all stages together.

        Raises:
            MissingDependency: ONNX Runtime is not installed.
            GenserveError: there are no kernels for this machine.
            RepositoryError: a file cannot be loaded or is not such a stage, the files are of several exports,
                the devices are of several kinds, or there is no room.
        """
        memories = memories or [HostMemory()] * len(paths)
        self.graphs = _opened(paths, memories, num_threads=num_threads)
        self.metadata = self.graphs[0].metadata
        super().__init__(
            [
                CachePart(memory=stage.memory, shapes=stage.token_shapes, states=stage.state_shapes)
                for stage in self.graphs
            ],
            path=paths[0],
            context_length=exported_context_length(self.metadata, paths[0]),
            **sizes,
        )
        for stage in self.graphs:
            stage.bind_cache(self.cache)
        self.vocab_size = self.graphs[-1].width
        self._workers = [
            ThreadPoolExecutor(1, thread_name_prefix=f"{path.stem}-stage") for path in paths[:-1]
        ]
        self._logits = self._rows(max(self.max_num_seqs, _MEASURED_TOKENS))
        if not memories[0].is_host:
            check_written_cache(self._run_in_turn, self.cache, path=paths[0], device=memories[0].device)
        self._costs = self._measured_costs(paths) if max_micro_batch is None else ()
        self._max_micro_batch = max_micro_batch

    def forward(self, batch: ForwardBatch) -> LogitsArray:
        """See `LogitsModel.forward`. The error of a stage is raised when no stage runs any more."""
        num_rows, num_tokens = len(batch.logits_indices), len(batch.token_ids)
        if num_rows >= len(self._logits):
            self._logits = self._rows(num_rows)
        number = self._num_micro_batches(num_tokens)
        if number == 1:
            self._run_in_turn(batch)
        else:
            ends = [num_tokens * index // number for index in range(number + 1)]
            self._run_overlapped([tokens_of(batch, start, end) for start, end in pairwise(ends)])
        logits: LogitsArray = self._logits[:num_rows]
        return logits

    def close(self) -> None:
        """End the threads of the stages; no forward follows."""
        for worker in self._workers:
            worker.shutdown()

    def _num_micro_batches(self, num_tokens: int) -> int:
        if self._max_micro_batch is not None:
            return -(-num_tokens // self._max_micro_batch)
        return num_micro_batches(self._costs, num_tokens)

    def _run_in_turn(self, batch: ForwardBatch) -> list[float]:
        """Run the whole batch in one stage after the other, and return the seconds of each."""
        times_s = [time.perf_counter()]
        hidden_states = None
        for stage in self.graphs[:-1]:
            hidden_states = _hidden_states(stage, batch, hidden_states)
            times_s.append(time.perf_counter())
        self._run_last(batch, slice(len(batch.logits_indices)), hidden_states)
        times_s.append(time.perf_counter())
        return [end - start for start, end in pairwise(times_s)]

    def _run_overlapped(self, parts: Sequence[tuple[ForwardBatch, slice]]) -> None:
        """Run micro-batches, each with the rows of its logits."""
        started: list[Future[Any]] = []
        inputs: list[Future[Any]] = []  # the inputs of the last stage
        try:
            for part, _ in parts:
                before = None
                for stage, worker in zip(self.graphs[:-1], self._workers, strict=True):
                    before = worker.submit(_hidden_states, stage, part, before)
                    started.append(before)
                inputs.append(started[-1])
            for (part, rows), hidden_states in zip(parts, inputs, strict=True):
                self._run_last(part, rows, hidden_states.result())
        finally:
            for future in started:
                future.cancel()
            wait(started)

    def _run_last(self, part: ForwardBatch, rows: slice, hidden_states: Any) -> None:
        wanted = self._logits[rows]
        self.graphs[-1].run(part, wanted if len(wanted) else self._logits[-1:], hidden_states=hidden_states)

    def _rows(self, num_rows: int) -> Any:
        """Return a buffer for logits, whose last row is for micro-batches without wanted logits."""
        stage = self.graphs[-1]
        return stage.memory.rows(num_rows + 1, stage.width, stage.dtype)

    def _measured_costs(self, paths: Sequence[Path]) -> tuple[StageCost, ...]:
        """Run one token and several, both twice: the first run may read weights from the disk."""
        several = min(_MEASURED_TOKENS, self.max_length)
        times_s = {}
        for num_tokens in (1, 1, several, several):
            batch = ForwardBatch.of(
                [[0] * num_tokens],
                num_computed_tokens=[0],
                block_table=[range(-(-num_tokens // self.block_size))],
                logits_indices=range(num_tokens),
                **self.cache.first_states(),
            )
            times_s[num_tokens] = self._run_in_turn(batch)
        costs = []
        for path, stage, one_s, several_s in zip(
            paths, self.graphs, times_s[1], times_s[several], strict=True
        ):
            token_s = max(0.0, several_s - one_s) / max(1, several - 1)
            costs.append(StageCost(run_s=max(0.0, one_s - token_s), token_s=token_s))
            logger.info(
                "%s on %s:%d: %.2f ms for 1 token, %.2f ms for %d",
                path.name,
                stage.memory.device,
                stage.memory.device_id,
                one_s * 1e3,
                several_s * 1e3,
                several,
            )
        return tuple(costs)


def _hidden_states(stage: LogitsGraph, batch: ForwardBatch, before: Any) -> Any:
    """Run a stage before the last; `before` has the hidden states of the previous stage, or its run."""
    output = stage.memory.rows(len(batch.token_ids), stage.width, stage.dtype)
    stage.run(batch, output, hidden_states=before.result() if isinstance(before, Future) else before)
    return output


def _opened(
    paths: Sequence[Path], memories: Sequence[LogitsMemory], *, num_threads: int | None
) -> list[LogitsGraph]:
    """Load the graphs, and check by their metadata that they fit each other. See `PipelineLogits`."""
    if len({memory.device for memory in memories}) > 1:
        raise RepositoryError(
            f"{paths[0]}: the stages of a pipeline run on devices of one kind",
            remedy="write one kind into all instance groups of the logits stage's config.pbtxt",
            field="instance_group",
        )
    stages = [
        LogitsGraph(
            path,
            num_threads=num_threads or max(1, default_threads() // len(paths)),
            memory=memory,
            stage=number,
            num_stages=len(paths),
        )
        for number, (path, memory) in enumerate(zip(paths, memories, strict=True), 1)
    ]
    described = [
        {key: value for key, value in stage.metadata.items() if key != "genserve.pipeline_stage"}
        for stage in stages
    ]
    for path, other in zip(paths, described, strict=True):
        if other != described[0]:
            raise RepositoryError(
                f"{path} and {paths[0].name} are of two exports: {other} and {described[0]}",
                remedy=EXPORT_AGAIN,
            )
    return stages
