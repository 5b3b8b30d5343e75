"""Engine: each step schedules requests, runs the model, and processes its logits."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from genserve.engine.decoding_loops import DecodeFunction, DecodingLoops
from genserve.engine.disk_cache import DiskCache
from genserve.engine.engine_request import LogitsRequest, Request, RequestStatus
from genserve.engine.kv_cache_manager import KVCacheManager
from genserve.engine.logits_model import LogitsModel
from genserve.engine.model_runner import ModelRunner
from genserve.engine.paused_loops import PausedLoops
from genserve.engine.prefix_cache import StoredBlocks
from genserve.engine.scheduler import Scheduler, SchedulerOutput
from genserve.engine.speculation import Speculation
from genserve.engine.state_slots import NO_SLOT
from genserve.engine.step_processor import StepOutputs, StepProcessor
from genserve.engine.token_sequence import TokenSequence
from genserve.errors import SEE_LOG, GenserveError, ModelFailed
from genserve.sampling.logits_array import LogitsArray

logger = logging.getLogger(__name__)

_STORE_S = 1.0  # a process that is killed loses the blocks of this time
_RESUMED = -1  # the arrival number of resumed sequences, before all other sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The results of one step."""

    advanced: tuple[TokenSequence, ...]  # each has a new delta; some have finished
    logits: tuple[tuple[LogitsRequest, LogitsArray], ...]  # the rows belong to the receivers
    failed: dict[Request, GenserveError]  # the requests that left without finishing
    started: tuple[Request, ...]  # the requests that left the waiting queue
    full: bool  # a request found no slot or too few blocks
    num_prompt_tokens: int  # 0: the step only decoded
    num_preempted: int  # requests that went back to the queue
    num_drafted: int  # drafted tokens
    num_accepted: int  # drafted tokens that were accepted


class Engine:
    """Continuous batching over the paged KV cache of one logits model. One thread owns it.

    The computed tokens of a request stay cached when it leaves, and a request that starts with them continues
    there. When blocks run out, the youngest request is preempted: its stream pauses, its text stays the same.

    Attributes:
        clock: returns seconds; used for the submission times of logits requests. Safe from any thread.
        disk_cache: the cached blocks in files, if there are any.
        has_states: whether the model has recurrent states.
    """

    def __init__(
        self,
        model: LogitsModel,
        *,
        decode: DecodeFunction,
        max_num_batched_tokens: int = 256,
        prefix_cache: bool = True,
        disk_cache: DiskCache | None = None,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without requests.

        Each token sequence gets a `decode` loop, which `speculation` may help with drafts. Without
        `prefix_cache`, only logits requests share prefixes. `disk_cache` has the blocks of the model's KV
        cache in files. `clock` returns seconds.

        Raises:
            ValueError: the model has states, but fewer than two slots for each sequence of a forward.
        """
        if 0 < model.num_state_slots < 2 * model.max_num_seqs:
            raise ValueError(f"{model.num_state_slots} state slots are too few for {model.max_num_seqs} seqs")
        self.clock = clock
        self.disk_cache = disk_cache
        self._kv = KVCacheManager(
            num_blocks=model.num_blocks,
            block_size=model.block_size,
            num_state_slots=model.num_state_slots,
            prefix_cache=prefix_cache,
            stores_blocks=disk_cache is not None and disk_cache.writes,
        )
        self._scheduler = Scheduler(
            self._kv,
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            speculation=speculation,
        )
        self._runner = ModelRunner(
            model, self._kv, max_num_batched_tokens=self._scheduler.max_num_batched_tokens
        )
        self.has_states = self._kv.has_states
        self._loops = DecodingLoops(decode)
        self._processor = StepProcessor(self._kv, self._loops, speculation=speculation)
        self._speculation = speculation
        self._paused = PausedLoops()
        self._stored_s = -math.inf  # when blocks were last given to the disk cache
        self._next_deadline_s = math.inf  # no sequence has an earlier one

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a slot."""
        return self._scheduler.num_waiting

    @property
    def num_without_adapters(self) -> Counter[int]:
        """See `Scheduler`."""
        return self._scheduler.num_without_adapters

    @property
    def num_running(self) -> int:
        """How many requests hold blocks of the KV cache."""
        return self._scheduler.num_running

    @property
    def cache_usage(self) -> float:
        """The share of the KV cache's blocks that requests hold, 0 to 1."""
        return self._kv.usage

    @property
    def state_usage(self) -> float:
        """The share of the state slots that requests hold, 0 to 1; 0 without states."""
        return self._kv.states.usage

    @property
    def num_snapshot_hits(self) -> int:
        """How many requests have started from the snapshot of a state."""
        return self._kv.num_snapshot_hits

    @property
    def num_recomputed_tokens(self) -> int:
        """How many tokens with cached blocks were computed again for lack of a snapshot."""
        return self._kv.num_recomputed_tokens

    def add(self, sequence: TokenSequence) -> None:
        """Put a token sequence into the waiting queue; the first choice of a beam search brings its beams."""
        group = sequence.group
        if group.status is RequestStatus.NEW:
            # A resumed sequence has waited already, so it comes first, as after a preemption.
            self._scheduler.add(group, arrival=_RESUMED if sequence.is_resumed else None)
        if sequence.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, sequence.deadline_s)

    def add_logits(self, request: LogitsRequest) -> None:
        """Put a logits request into the waiting queue."""
        self._scheduler.add(request, arrival=self._paused.resume(request))

    def remove(self, requests: Iterable[Request]) -> None:
        """Remove waiting or running requests with all that the engine holds for them.

        A beam search is removed with any of its choices.
        """
        for request in requests:
            group = request.group
            self._scheduler.remove(group)
            for choice in group.choices:
                if isinstance(choice, TokenSequence):
                    self._loops.close(choice)
                    if self._speculation is not None:
                        self._speculation.drop(choice)
        self._store_filled()

    def is_cached(self, key: bytes) -> bool:
        """See `KVCacheManager.is_cached`."""
        return self._kv.is_cached(key)

    def has_snapshot(self, key: bytes) -> bool:
        """See `KVCacheManager.has_snapshot`."""
        return self._kv.has_snapshot(key)

    def restore(self, stored: StoredBlocks) -> None:
        """Put blocks of a prompt that were read from files into the prefix cache, in blocks that are free."""
        assert self.disk_cache is not None
        rows, block_ids, slot = self._kv.restore(stored)
        self._store_filled()
        every = len(rows) == len(stored.rows)
        self.disk_cache.memory.write_blocks(block_ids, stored.rows if every else stored.rows[rows])
        self.disk_cache.recycle(stored.rows)
        if slot != NO_SLOT and stored.state is not None:
            self.disk_cache.memory.write_states([slot], stored.state[np.newaxis])

    def _store_filled(self) -> None:
        """Have the disk cache copy what was filled, while it is as it was computed: many blocks at once.

        A copy reads all buffers of the KV cache, so a single block takes three times as long as one of many.
        """
        if self.disk_cache is None:
            return
        filled, now_s = self._kv.filled, self.clock()
        if filled:
            num_stored = len(filled) // self.disk_cache.part_blocks * self.disk_cache.part_blocks
            if (
                not self._scheduler.num_running
                or now_s - self._stored_s >= _STORE_S
                or self._kv.has_evicted_filled()
            ):
                num_stored = len(filled)
            if num_stored:
                self.disk_cache.store(filled[:num_stored])
                del filled[:num_stored]
                self._stored_s = now_s
        if self._kv.kept:
            self.disk_cache.store_states(self._kv.kept)
            self._kv.kept.clear()

    def expected_to_resume(self, *, within_s: float) -> tuple[int, float]:
        """Return how many paused loops always resume within a time, and how long to wait for them."""
        return self._paused.expected(self.clock(), within_s=within_s)

    @property
    def reserved_s(self) -> float:
        """How long it takes until a slot that is reserved for a paused loop is free; 0: none is reserved."""
        return self._paused.reserved_s(self.clock())

    @property
    def next_deadline_s(self) -> float:
        """A time by `clock` before which no deadline of a sequence passes; infinite: none has one."""
        return self._next_deadline_s

    def step(self) -> StepResult | None:
        """Run one forward and process its logits; None if nothing can be computed now."""
        started_s = self.clock()
        scheduled = self._scheduler.schedule(num_reserved=self._paused.num_reserved(started_s))
        if scheduled is None:
            return None
        self._store_filled()  # a preempted sequence leaves a snapshot, whose slot this forward may write
        try:
            logits, num_rows = self._runner.run(scheduled)
        except Exception:
            logger.exception("forward failed")
            failure = ModelFailed("the model's forward failed", remedy=SEE_LOG)
            outputs = StepOutputs()
            outputs.failed.update((c, failure) for r in scheduled.requests for c in r.group.choices)
        else:
            self._scheduler.record_step(scheduled, self.clock() - started_s)
            outputs = self._processor.process(scheduled, logits, num_rows)
        return self._result(scheduled, outputs, started_s=started_s)

    def expire(self) -> StepResult:
        """End the sequences whose deadline has passed, while there is nothing to compute."""
        return self._result(SchedulerOutput(), StepOutputs(), started_s=self.clock())

    def check_integrity(self) -> None:
        """Raise AssertionError if requests, blocks and loops disagree; for tests."""
        assert self.num_running or not self._kv.filled, "an idle engine has blocks that are not stored"
        assert not self._kv.has_evicted_filled(), "the next step may overwrite blocks that are not stored"
        self._scheduler.check_integrity()

    def _result(self, scheduled: SchedulerOutput, outputs: StepOutputs, *, started_s: float) -> StepResult:
        """Remove the requests that failed, finished or expired, or have their logits; return the results."""
        failed, now_s = outputs.failed, self.clock()
        expired = self._expire(now_s, failed) if self._next_deadline_s <= now_s else []
        advanced = [s for s in outputs.generated if s not in failed] if failed else [*outputs.generated]
        for request, _ in outputs.logits:
            self._paused.pause(request, now_s=now_s, step_s=now_s - started_s)
        finished = [s for s in advanced if s.finish_reason is not None]
        self.remove([*failed, *finished, *(r for r, _ in outputs.logits), *expired])
        if expired:
            advanced += [s for s in expired if s not in outputs.generated and s not in failed]
        return StepResult(
            advanced=tuple(advanced),
            logits=tuple(outputs.logits),
            failed=failed,
            started=tuple(choice for group in scheduled.started for choice in group.choices),
            full=scheduled.full,
            num_prompt_tokens=scheduled.num_prompt_tokens,
            num_preempted=scheduled.num_preempted,
            num_drafted=scheduled.num_drafted,
            num_accepted=outputs.num_accepted,
        )

    def _expire(self, now_s: float, failed: dict[Request, GenserveError]) -> list[TokenSequence]:
        """End the sequences whose deadline has passed, waiting ones too; return them."""
        expired = [s for s in self._sequences() if s.is_expired(now_s) and s not in failed]
        for sequence in expired:
            try:
                sequence.expire()
            except GenserveError as error:  # an output parser failed
                failed[sequence] = error
        deadlines_s = [s.deadline_s for s in self._sequences() if s.deadline_s is not None and not s.finished]
        self._next_deadline_s = min(deadlines_s, default=math.inf)
        return expired

    def _sequences(self) -> Iterator[TokenSequence]:
        """Yield the sequences that wait or run."""
        scheduler = self._scheduler
        for group in (*scheduler.waiting, *scheduler.running, *scheduler.without_adapters):
            for choice in group.choices:
                if isinstance(choice, TokenSequence):
                    yield choice
