"""Engine: each step schedules requests, runs the model, and processes its logits."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from genserve.completion import FinishReason
from genserve.errors import SEE_LOG, GenserveError, ModelFailed
from genserve.generation.engine_request import LogitsRequest, Request, TokenSequence
from genserve.generation.kv_cache_manager import KVCacheManager
from genserve.generation.logits_model import LogitsArray, LogitsModel
from genserve.generation.model_runner import ModelRunner
from genserve.generation.output_processor import DecodeFunction, DecodingLoops, OutputProcessor, Outputs
from genserve.generation.scheduler import Scheduler, SchedulerOutput
from genserve.generation.speculation import Speculation

__all__ = ["Engine", "ReturningLoops", "StepResult"]


# A loop that is away keeps its place in the forward, as a running sequence does, for so long and a few times
# its last pause.
_HOLD_S = 0.02
_NUM_PAUSES = 4
_LONGEST_PAUSE_S = 1.0      # one that was away for longer is like one that has not come back yet
_NUM_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class _ReturningLoop:
    arrival: int        # its number in the queue
    since_s: float
    held_until_s: float
    pause_s: float      # how long its caller was away the last time; infinite: it has not come back yet


class ReturningLoops:
    """The loops that are away, by the tokens that they were answered for. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._loops: OrderedDict[tuple[int, ...], _ReturningLoop] = OrderedDict()

    def leave(self, request: LogitsRequest, *, arrival: int, now_s: float, step_s: float) -> None:
        """Note that a request was answered.

        Who has not come back yet may never do so: to hold its place for half the time of a step costs less
        than to have it wait for one.
        """
        pause_s = request.pause_s
        held_s = _HOLD_S + _NUM_PAUSES * pause_s if pause_s < _LONGEST_PAUSE_S else min(_HOLD_S, step_s / 2)
        self._loops[tuple(request.token_ids)] = _ReturningLoop(arrival, now_s, now_s + held_s, pause_s)
        if len(self._loops) > _NUM_REMEMBERED:
            self._loops.popitem(last=False)

    def come_back(self, request: LogitsRequest) -> int | None:
        """Return the number that its loop has in the queue, and note its pause; None: it is a new one."""
        loop = self._loops.pop(tuple(request.token_ids[:-1]), None) or self._loops.pop(
            tuple(request.token_ids), None
        )
        if loop is None:
            return None
        request.pause_s = request.submitted_s - loop.since_s
        return loop.arrival

    def num_held(self, now_s: float) -> int:
        """Return for how many a place is kept."""
        return sum(1 for _ in self._held(now_s))

    def held_s(self, now_s: float) -> float:
        """Return for how long no place that is kept now becomes free; 0: none is kept."""
        return min((loop.held_until_s - now_s for loop in self._held(now_s)), default=0.0)

    def expected(self, now_s: float, *, within_s: float) -> tuple[int, float]:
        """Return how many should be back within `within_s` of their leaving, and for how long to wait."""
        since_s = [
            loop.since_s
            for loop in self._loops.values()
            if loop.pause_s < within_s and now_s - loop.since_s < within_s
        ]
        return len(since_s), max(since_s, default=now_s) + within_s - now_s

    def _held(self, now_s: float) -> Iterator[_ReturningLoop]:
        return (loop for loop in self._loops.values() if now_s < loop.held_until_s)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    advanced: tuple[TokenSequence, ...]                 # each has a delta to take; some have finished
    answered: tuple[tuple[LogitsRequest, LogitsArray], ...]   # a row each, the receiver's own
    failed: dict[Request, GenserveError]                # these have left without finishing
    begun: tuple[Request, ...]                          # these have left the queue
    full: bool                                          # somebody waited without a place or blocks
    num_prompt_tokens: int                              # computed of prompts; 0: it was decodes only
    num_preempted: int                                  # so many had to give back their blocks and wait
    num_drafted: int                                    # tokens that a draft proposed
    num_accepted: int                                   # so many of them were right


class Engine:
    """Continuous batching over the paged KV cache of one logits model. One thread owns it.

    What a request has computed stays cached when it leaves, and whoever begins with the same tokens goes on
    there. When blocks run out, the youngest has to wait again; its stream pauses, and its text is the same.

    Attributes:
        clock: seconds; by it a logits request says when it was submitted. Safe from any thread.
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
        """Begin with nothing to do.

        Args:
            model: computes the logits.
            decode: the decoding loop of each token sequence.
            max_num_batched_tokens: of a step.
            prefix_cache: whether token sequences share what they begin with; logits requests always do.
            speculation: several tokens of a sequence in one step; None: never.
            clock: seconds.
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
        self._returning = ReturningLoops()
        self._timed: set[TokenSequence] = set()     # those that have a deadline

    @property
    def num_waiting(self) -> int:
        """How many wait for a place."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """How many hold blocks of the KV cache."""
        return self._scheduler.num_running

    @property
    def cache_usage(self) -> float:
        """The share of the cache's blocks that those hold that run."""
        return self._kv.usage

    def add(self, sequence: TokenSequence) -> None:
        """Put a token sequence into the queue; of the answers of a beam search the first brings its beams."""
        if sequence is sequence.answers[0]:
            self._scheduler.add(sequence.lead)
        if sequence.deadline_s is not None:
            self._timed.add(sequence)

    def add_logits(self, request: LogitsRequest) -> None:
        """Put a logits request into the queue."""
        self._scheduler.add(request, arrival=self._returning.come_back(request))

    def remove(self, requests: Iterable[Request]) -> None:
        """Drop requests, wherever they are; their blocks are free at once.

        A beam search leaves with the first of its answers that does.
        """
        for request in requests:
            self._scheduler.remove(request.lead)
            for answer in request.answers:
                self._loops.drop(answer)
                if self._speculation is not None:
                    self._speculation.drop(answer)
            self._timed.difference_update(request.answers)

    def expected_back(self, *, within_s: float) -> tuple[int, float]:
        """Return how many loops over the logits should ask again soon, and for how long to expect them.

        Args:
            within_s: they come back in less than this, or are not expected.
        """
        return self._returning.expected(self.clock(), within_s=within_s)

    @property
    def held_s(self) -> float:
        """For how long no place in the forward becomes free, if each is kept for a loop that is away."""
        return self._returning.held_s(self.clock())

    def longest(self, num_sequences: int) -> int:
        """Return how many tokens each of so many sequences that need each other may have; from any thread."""
        return self._kv.longest(num_sequences, max_length=self._max_length)

    def step(self) -> StepResult | None:
        """Run one forward and process what it gives; None if nothing can be done now."""
        started_s = self.clock()
        scheduled = self._scheduler.schedule(num_held=self._returning.num_held(started_s))
        if scheduled is None:
            return None
        try:
            logits, num_rows = self._runner.run(scheduled)
        except Exception:
            logger.exception("forward failed")
            failure = ModelFailed("the model's forward failed", remedy=SEE_LOG)
            outputs = Outputs()
            outputs.failed.update((a, failure) for r in scheduled.requests for a in r.answers)
        else:
            self._scheduler.note_step(scheduled, self.clock() - started_s)
            outputs = self._processor.process(scheduled, logits, num_rows)
        return self._result(scheduled, outputs, started_s=started_s)

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, blocks and loops disagree; for tests."""
        self._scheduler.check_integrity()
        assert len(self._loops) <= self.num_running + self.num_waiting, "a loop outlived its sequence"

    def _result(self, scheduled: SchedulerOutput, outputs: Outputs, *, started_s: float) -> StepResult:
        """Let go of those that failed, finished, or are answered."""
        failed, now_s = outputs.failed, self.clock()
        late = self._end_late(now_s, failed) if self._timed else []
        advanced = [*(s for s in outputs.generated if s not in failed)] if failed else [*outputs.generated]
        for request, _ in outputs.answered:
            arrival = self._scheduler.arrival(request)
            self._returning.leave(request, arrival=arrival, now_s=now_s, step_s=now_s - started_s)
        self.remove([*failed, *(s for s in advanced if s.finished), *(r for r, _ in outputs.answered), *late])
        if late:
            advanced += [s for s in late if s not in outputs.generated and s not in failed]
        return StepResult(
            advanced=tuple(advanced),
            answered=tuple(outputs.answered),
            failed=failed,
            begun=tuple(answer for lead in scheduled.begun for answer in lead.answers),
            full=scheduled.full,
            num_prompt_tokens=scheduled.num_prompt_tokens,
            num_preempted=scheduled.num_preempted,
            num_drafted=scheduled.num_drafted,
            num_accepted=outputs.num_accepted,
        )

    def _end_late(self, now_s: float, failed: dict[Request, GenserveError]) -> list[TokenSequence]:
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
