"""Engine: each step schedules requests, runs the model, and processes its logits."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from genserve.errors import SEE_LOG, GenserveError, ModelFailed
from genserve.generation.engine_request import LogitsRequest, Request, TokenSequence
from genserve.generation.kv_cache_manager import KVCacheManager
from genserve.generation.logits_model import LogitsModel
from genserve.generation.model_runner import ModelRunner
from genserve.generation.output_processor import DecodeFunction, DecodingLoops, OutputProcessor, StepOutputs
from genserve.generation.scheduler import Scheduler, SchedulerOutput
from genserve.generation.speculation import Speculation
from genserve.sampling.logits_array import LogitsArray

logger = logging.getLogger(__name__)

# A paused loop keeps its place in the forward, as a running sequence does, for this time and a few pauses.
_HOLD_S = 0.02
_NUM_PAUSES = 4
_MAX_PAUSE_S = 1.0          # longer pauses are treated like those of a loop that never resumed
_MAX_PAUSED = 256
# The arrival number of resumed sequences: before all others.
_RESUMED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The results of one step."""

    advanced: tuple[TokenSequence, ...]                 # each has a delta to take; some have finished
    answered: tuple[tuple[LogitsRequest, LogitsArray], ...]   # and their rows, which belong to the receivers
    failed: dict[Request, GenserveError]                # these have left without finishing
    started: tuple[Request, ...]                        # these have left the queue
    full: bool                                          # a request found no place or too few blocks
    num_prompt_tokens: int                              # 0: the step only decoded
    num_preempted: int                                  # requests that went back to the queue
    num_drafted: int                                    # drafted tokens
    num_accepted: int                                   # drafted tokens that were accepted


class Engine:
    """Continuous batching over the paged KV cache of one logits model. One thread owns it.

    The computed tokens of a request stay cached when it leaves, and a request that starts with them continues
    there. When blocks run out, the youngest request is preempted: its stream pauses, its text stays the same.

    Attributes:
        clock: seconds; used for the submission times of logits requests. Safe from any thread.
    """

    def __init__(
        self,
        model: LogitsModel,
        *,
        decode: DecodeFunction,
        max_num_batched_tokens: int = 256,
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without requests.

        Each token sequence gets a `decode` loop, which `speculation` may help with drafts. Without
        `prefix_cache`, only logits requests share prefixes. `clock` returns seconds.
        """
        self.clock = clock
        self._max_length = model.max_length
        self._kv = KVCacheManager(
            num_blocks=model.num_blocks, block_size=model.block_size, prefix_cache=prefix_cache
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
        self._loops = DecodingLoops(decode)
        self._processor = OutputProcessor(self._kv, self._loops, speculation=speculation)
        self._speculation = speculation
        self._paused = PausedLoops()
        self._timed: set[TokenSequence] = set()     # the sequences with a deadline

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a place."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """How many requests hold blocks of the KV cache."""
        return self._scheduler.num_running

    @property
    def cache_usage(self) -> float:
        """The share of the KV cache's blocks that requests hold, 0 to 1."""
        return self._kv.usage

    def add(self, sequence: TokenSequence) -> None:
        """Put a token sequence into the queue; the first answer of a beam search brings its beams."""
        if sequence is sequence.answers[0]:
            # A resumed one has waited already, so it comes first, as after a preemption.
            self._scheduler.add(sequence.lead, arrival=_RESUMED if sequence.is_resumed else None)
        if sequence.deadline_s is not None:
            self._timed.add(sequence)

    def add_logits(self, request: LogitsRequest) -> None:
        """Put a logits request into the queue."""
        self._scheduler.add(request, arrival=self._paused.resume(request))

    def remove(self, requests: Iterable[Request]) -> None:
        """Drop waiting or running requests and free their blocks.

        A beam search is dropped with any of its answers.
        """
        for request in requests:
            self._scheduler.remove(request.lead)
            for answer in request.answers:
                self._loops.drop(answer)
                if self._speculation is not None:
                    self._speculation.drop(answer)
            self._timed.difference_update(request.answers)

    def expected_to_resume(self, *, within_s: float) -> tuple[int, float]:
        """Return how many paused loops over logits always resume within a time, and how long to wait.

        Args:
            within_s: the time since they were answered.
        """
        return self._paused.expected(self.clock(), within_s=within_s)

    @property
    def held_s(self) -> float:
        """How long it takes until a place that is held for a paused loop becomes free; 0: none is held."""
        return self._paused.held_s(self.clock())

    @property
    def next_deadline_s(self) -> float:
        """When the next deadline of a sequence passes, by `clock`; infinite: none has one."""
        deadlines = (s.deadline_s for s in self._timed if s.deadline_s is not None)
        return min(deadlines, default=math.inf)

    def max_tokens_per_sequence(self, num_sequences: int) -> int:
        """Return up to which length `num_sequences` sequences always fit together; from any thread."""
        return self._kv.max_tokens_per_sequence(num_sequences, max_length=self._max_length)

    def step(self) -> StepResult | None:
        """Run one forward and process its logits; None if nothing can be computed now."""
        started_s = self.clock()
        scheduled = self._scheduler.schedule(num_held=self._paused.num_held(started_s))
        if scheduled is None:
            return None
        try:
            logits, num_rows = self._runner.run(scheduled)
        except Exception:
            logger.exception("forward failed")
            failure = ModelFailed("the model's forward failed", remedy=SEE_LOG)
            outputs = StepOutputs()
            outputs.failed.update((a, failure) for r in scheduled.requests for a in r.answers)
        else:
            self._scheduler.note_step(scheduled, self.clock() - started_s)
            outputs = self._processor.process(scheduled, logits, num_rows)
        return self._result(scheduled, outputs, started_s=started_s)

    def expire(self) -> StepResult:
        """End the sequences whose deadline has passed, while there is nothing to compute."""
        return self._result(SchedulerOutput(), StepOutputs(), started_s=self.clock())

    def check_integrity(self) -> None:
        """Raise AssertionError if requests, blocks and loops disagree; for tests."""
        self._scheduler.check_integrity()
        assert len(self._loops) <= self.num_running + self.num_waiting, "a loop outlived its sequence"

    def _result(self, scheduled: SchedulerOutput, outputs: StepOutputs, *, started_s: float) -> StepResult:
        """Remove the requests that failed, finished, expired or were answered; return the step's results."""
        failed, now_s = outputs.failed, self.clock()
        expired = self._expire(now_s, failed) if self._timed else []
        advanced = [s for s in outputs.generated if s not in failed] if failed else [*outputs.generated]
        for request, _ in outputs.answered:
            arrival = self._scheduler.arrival(request)
            self._paused.pause(request, arrival=arrival, now_s=now_s, step_s=now_s - started_s)
        finished = [s for s in advanced if s.finish_reason is not None]
        self.remove([*failed, *finished, *(r for r, _ in outputs.answered), *expired])
        if expired:
            advanced += [s for s in expired if s not in outputs.generated and s not in failed]
        return StepResult(
            advanced=tuple(advanced),
            answered=tuple(outputs.answered),
            failed=failed,
            started=tuple(answer for lead in scheduled.started for answer in lead.answers),
            full=scheduled.full,
            num_prompt_tokens=scheduled.num_prompt_tokens,
            num_preempted=scheduled.num_preempted,
            num_drafted=scheduled.num_drafted,
            num_accepted=outputs.num_accepted,
        )

    def _expire(self, now_s: float, failed: dict[Request, GenserveError]) -> list[TokenSequence]:
        """End the sequences whose deadline has passed, waiting ones too; return them."""
        expired = [s for s in self._timed if s.is_expired(now_s) and s not in failed]
        for sequence in expired:
            try:
                sequence.expire()
            except GenserveError as error:  # of an output parser
                failed[sequence] = error
        return expired


@dataclass(frozen=True, slots=True)
class _PausedLoop:
    arrival: int        # its arrival number in the queue
    since_s: float
    held_until_s: float
    pause_s: float      # how long its last pause was; infinite: it never resumed


class PausedLoops:
    """Loops over logits that were answered and may resume with one more token.

    They are looked up by the tokens for which they were answered. Belongs to the engine's thread.
    """

    def __init__(self) -> None:
        self._loops: OrderedDict[tuple[int, ...], _PausedLoop] = OrderedDict()

    def pause(self, request: LogitsRequest, *, arrival: int, now_s: float, step_s: float) -> None:
        """Note that a request was answered.

        A loop that never resumed may be a single request. To hold its place for half a step costs less than
        to have it wait for a step.
        """
        pause_s = request.pause_s
        held_s = _HOLD_S + _NUM_PAUSES * pause_s if pause_s < _MAX_PAUSE_S else min(_HOLD_S, step_s / 2)
        self._loops[tuple(request.token_ids)] = _PausedLoop(arrival, now_s, now_s + held_s, pause_s)
        if len(self._loops) > _MAX_PAUSED:
            self._loops.popitem(last=False)

    def resume(self, request: LogitsRequest) -> int | None:
        """Return the arrival number of the request's loop, and note its pause; None: it is a new loop."""
        loop = self._loops.pop(tuple(request.token_ids[:-1]), None) or self._loops.pop(
            tuple(request.token_ids), None
        )
        if loop is None:
            return None
        request.pause_s = request.submitted_s - loop.since_s
        return loop.arrival

    def num_held(self, now_s: float) -> int:
        """Return how many places are held."""
        return sum(now_s < loop.held_until_s for loop in self._loops.values())

    def held_s(self, now_s: float) -> float:
        """Return how long it takes until one of the held places becomes free; 0: none is held."""
        held = (loop.held_until_s - now_s for loop in self._loops.values() if now_s < loop.held_until_s)
        return min(held, default=0.0)

    def expected(self, now_s: float, *, within_s: float) -> tuple[int, float]:
        """Return how many loops always resume within `within_s`, and how long to wait for these."""
        since_s = [
            loop.since_s
            for loop in self._loops.values()
            if loop.pause_s < within_s and now_s - loop.since_s < within_s
        ]
        return len(since_s), max(since_s, default=now_s) + within_s - now_s
