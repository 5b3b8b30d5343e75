"""Engine thread: the thread that owns an engine, and the way to it from every other thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

from genserve.completion import Delta
from genserve.errors import Closed, GenserveError, ModelFailed, ModelNotReady, Overloaded
from genserve.generation.admission_control import AdmissionControl, QueueLimits, Reason
from genserve.generation.engine import Engine, StepResult
from genserve.generation.engine_request import LogitsRequest, Request, TokenSequence
from genserve.generation.logits_model import LogitsArray
from genserve.generation_metrics import GenerationMetrics

__all__ = ["EngineThread", "Outbox", "RequestOutput", "Reservation"]

logger = logging.getLogger(__name__)

# How long a step may wait for loops that always come back at once, as a share of the last decode step.
GATHER = 0.5
GATHER_BESIDE_GENERATION = 0.1

# An error is the last output of its sequence, as a delta with a finish reason is.
RequestOutput: TypeAlias = tuple[TokenSequence, Delta | GenserveError]


class Outbox(Protocol):
    """Where the outputs of one step go: one call per step and outbox, not one per token."""

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Take over the outputs; called on the engine's thread, must not block."""


@dataclass(slots=True, kw_only=True)
class _Submission:
    """Token sequences that were submitted together."""

    arrived_s: float        # before they were prepared
    begun: bool = False     # one of them has had its first step


@dataclass(slots=True, kw_only=True)
class _Ticket:
    """What the thread knows of a token sequence that has not ended."""

    sequence: TokenSequence
    submission: _Submission
    outbox: Outbox
    num_seqs: int           # that it counts for, of a beam search the first for all beams beyond the answers
    num_tokens: int         # of its prompt; of a beam search only the first has them


class Reservation:
    """Places that `EngineThread.reserve` keeps for a request while its prompts are prepared.

    A context manager; safe from any thread.

    Attributes:
        count: how many.
        priority: of the request.
        arrived_s: when it came, by the engine's clock; its wait begins there.
        queued: whether others were being prepared when it came; otherwise it waits for none of them.
    """

    def __init__(
        self, thread: EngineThread, count: int, *, priority: int, arrived_s: float, queued: bool
    ) -> None:
        self.count = count
        self.priority = priority
        self.arrived_s = arrived_s
        self.queued = queued
        self.released = False
        self._thread = thread

    def check(self) -> None:
        """Raise what `EngineThread.submit` would for an engine that was closed, or a wait that was too long.

        To be called when a thread is free, before it prepares the prompts.
        """
        self._thread.check_reserved(self)

    def release(self) -> None:
        """Give the places back; a second call does nothing."""
        self._thread.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.release()


class EngineThread:
    """The thread that owns an engine.

    Everything public is safe from any thread; times are those of the engine's clock. Every
    sequence that `submit` accepts ends with exactly one last output, and every logits request is
    answered exactly once, unless it is cancelled: then nothing follows.
    """

    def __init__(
        self, engine: Engine, *, name: str, max_num_seqs: int, limits: QueueLimits, metrics: GenerationMetrics
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        lock = threading.RLock()
        self._changed = threading.Condition(lock)   # the thread waits for it
        self._idle = threading.Condition(lock)
        # Guarded by the conditions.
        self._admission = AdmissionControl(max_num_seqs=max_num_seqs, limits=limits, metrics=metrics)
        self._arriving: list[_Ticket] = []
        self._arriving_logits: list[LogitsRequest] = []
        self._waiting: dict[Request, _Ticket] = {}  # for their first step, as they came
        self._oldest_s = math.inf           # nobody in there has come before
        self._num_awaited = 1               # arrivals for which the thread is worth waking
        self._cancelled: set[Request] = set()
        self._closing = False
        self._failure: GenserveError | None = None
        # The thread's own.
        self._tickets: dict[Request, _Ticket] = {}
        self._unanswered: dict[Request, LogitsRequest] = {}
        self._decode_s = 0.0                # of the last decode step
        self._num_steps = 0
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; False after `close` or a failure that nothing caught."""
        return self._thread.is_alive() and not self._closing and self._failure is None

    @property
    def num_running(self) -> int:
        """Token sequences, beams and logits requests that hold blocks and have something to compute."""
        return self._engine.num_running

    @property
    def num_accepted(self) -> int:
        """Token sequences and logits requests not ended, those that wait included.

        A beam search counts as many as it has beams.
        """
        return self._admission.num_accepted

    @property
    def capacity(self) -> int:
        """How many may run, wait and be prepared together."""
        return self._admission.capacity

    @property
    def num_preparing(self) -> int:
        """Places that are reserved for those whose prompts are being prepared."""
        return self._admission.num_preparing

    @property
    def now_s(self) -> float:
        """What the engine's clock says, by which deadlines are told."""
        return self._engine.clock()

    @property
    def num_steps(self) -> int:
        """Forwards run so far."""
        return self._num_steps

    def max_tokens_per_sequence(self, num_sequences: int) -> int:
        """Return how many tokens each of so many sequences that need each other may have."""
        return self._engine.max_tokens_per_sequence(num_sequences)

    def reserve(self, count: int, *, priority: int = 0) -> Reservation:
        """Keep so many places for a request whose prompts are still to be prepared.

        Raises:
            Closed, ModelNotReady, Overloaded: as `submit` would if so many short prompts came now.
        """
        now_s = self._engine.clock()
        with self._changed:
            self._check_open()
            self._admission.check(count, num_tokens=0, priority=priority, now_s=now_s)
            queued = self._admission.num_preparing > 0
            self._admission.reserve(count, priority=priority)
        return Reservation(self, count, priority=priority, arrived_s=now_s, queued=queued)

    def check_reserved(self, reservation: Reservation) -> None:
        """See `Reservation.check`."""
        limit_s = self._admission.limits.max_wait_s
        now_s = self._engine.clock()
        with self._changed:
            self._check_open()
            if limit_s is not None and reservation.queued and now_s - reservation.arrived_s > limit_s:
                raise self._overdue(limit_s, now_s=now_s)

    def release(self, reservation: Reservation) -> None:
        """See `Reservation.release`."""
        with self._changed:
            if not reservation.released:
                reservation.released = True
                self._admission.release(reservation.count, priority=reservation.priority)

    def submit(
        self, *sequences: TokenSequence, outbox: Outbox, reservation: Reservation | None = None
    ) -> None:
        """Accept token sequences, all of them or none; their outputs go to `outbox`.

        Args:
            sequences: of one request.
            outbox: called on the engine's thread.
            reservation: of the request; it is given back whether they are accepted or not.

        Raises:
            Closed: `close` was called.
            ModelNotReady: its thread has died.
            Overloaded: as much as may wait is waiting, or they would wait too long.

        Sequences of which none has had its first step within the limit end with Overloaded, too.
        """
        now_s = self._engine.clock()
        submission = _Submission(arrived_s=reservation.arrived_s if reservation else now_s)
        tickets = [_ticket(sequence, submission, outbox) for sequence in sequences]
        num_seqs = sum(ticket.num_seqs for ticket in tickets)
        with self._changed:
            if reservation is not None:
                self.release(reservation)
            self._check_open()
            self._admission.check(
                num_seqs,
                num_tokens=sum(ticket.num_tokens for ticket in tickets),
                priority=sequences[0].priority,
                now_s=now_s,
            )
            self._admission.accept(num_seqs)
            for ticket in tickets:
                priority = ticket.sequence.priority
                self._admission.wait(ticket.num_seqs, num_tokens=ticket.num_tokens, priority=priority)
                self._waiting[ticket.sequence] = ticket
            self._oldest_s = min(self._oldest_s, submission.arrived_s)
            self._arriving += tickets
            self._notify_arrival()

    def submit_logits(self, requests: Sequence[LogitsRequest]) -> None:
        """Accept logits requests, all of them or none; raises what `submit` raises.

        Requests that come at the same pace share their steps. One that begins with what an earlier
        one has computed goes on there. Any may be the next token of a loop that has long begun: so of the
        limits only the one on requests is for them.
        """
        now_s = self._engine.clock()
        for request in requests:
            request.submitted_s = now_s
        with self._changed:
            self._check_open()
            self._admission.check_count(len(requests), now_s=now_s)
            self._admission.accept(len(requests))
            self._arriving_logits += requests
            self._notify_arrival()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise ModelNotReady(self._failure.message)
        if self._closing:
            raise Closed("the model is being unloaded or the server stops")

    @property
    def _num_arriving(self) -> int:
        return len(self._arriving) + len(self._arriving_logits)

    def _notify_arrival(self) -> None:
        if self._num_arriving >= self._num_awaited:
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Drop a token sequence or a logits request before the next step; fine if it has ended already.

        With one answer of a beam search all of them leave.
        """
        with self._changed:
            self._cancelled.add(request)
            self._changed.notify()

    def drain(self, *, timeout_s: float) -> None:
        """Wait until all that was accepted has ended, or for so long; what comes meanwhile is accepted."""
        with self._idle:
            self._idle.wait_for(lambda: not self._admission.num_accepted, timeout_s)

    def close(self) -> None:
        """End everything with `Closed`, and the thread; a second call does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._take_arrivals()
                self._gather()
                stepped = self._step()
                self._refuse_overdue()
                if not stepped:
                    self._wait_for_change(self._engine.held_s)
                self._report_occupancy()
            self._end_all(Closed("the server stopped before the answer was complete"))
        except BaseException:
            logger.exception("engine thread died")
            failure = ModelFailed("the engine failed; its model must be loaded again")
            with self._changed:
                self._failure = failure
            self._end_all(failure)

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False once it closes."""
        with self._changed:
            while not (self._tickets or self._unanswered or self._num_arriving or self._closing):
                self._cancelled.clear()
                self._changed.wait()
            return not self._closing

    def _take_arrivals(self) -> None:
        with self._changed:
            arriving, self._arriving = self._arriving, []
            arriving_logits, self._arriving_logits = self._arriving_logits, []
            cancelled, self._cancelled = self._cancelled, set()
        for ticket in arriving:
            self._tickets[ticket.sequence] = ticket
            self._engine.add(ticket.sequence)
        for request in arriving_logits:
            self._unanswered[request] = request
            self._engine.add_logits(request)
        if cancelled:
            self._drop({answer for request in cancelled for answer in request.answers})

    def _drop(self, cancelled: set[Request]) -> None:
        cancelled &= self._tickets.keys() | self._unanswered.keys()
        self._engine.remove(cancelled)
        for request in cancelled:
            self._metrics.request_cancelled()
            self._end(request)

    def _gather(self) -> None:
        """Wait a little for the loops that have always come back at once, so that they share the step.

        Without it, loops that are answered together and come back microseconds apart fall into groups
        that step by turns, each step as long as one for all.
        """
        if not (self._tickets or self._unanswered):
            return
        share = GATHER_BESIDE_GENERATION if self._tickets else GATHER
        while not self._closing:
            awaited, seconds = self._engine.expected_back(within_s=share * self._decode_s)
            if not awaited:
                return
            self._wait_for_change(seconds, num_awaited=awaited)
            self._take_arrivals()

    def _wait_for_change(self, seconds: float, *, num_awaited: int = 1) -> None:
        """Wait until so many have arrived, one is cancelled, the thread is to end, or the time is over."""
        with self._changed:
            self._num_awaited = num_awaited
            self._changed.wait_for(
                lambda: self._num_arriving >= num_awaited or self._cancelled or self._closing, seconds
            )
            self._num_awaited = 1

    def _report_occupancy(self) -> None:
        self._metrics.occupancy(
            running=self._engine.num_running,
            waiting=self._engine.num_waiting,
            waiting_tokens=self._admission.num_tokens,
            cache_usage=self._engine.cache_usage,
        )

    def _step(self) -> bool:
        """Run a step; False if there is work, and all places are kept for loops that are away."""
        started_s = time.monotonic()
        result = self._engine.step()
        if result is None:
            return not (self._tickets or self._unanswered)
        self._num_steps += 1
        seconds = time.monotonic() - started_s
        now_s = self._engine.clock()
        self._note_begun(result, seconds=seconds, now_s=now_s)
        if not result.num_prompt_tokens:
            self._decode_s = seconds
        self._metrics.step(
            seconds=seconds,
            prompt_tokens=result.num_prompt_tokens,
            preempted=result.num_preempted,
        )
        self._metrics.speculated(drafted=result.num_drafted, accepted=result.num_accepted)
        self._hand_over(self._outputs(result), now_s=now_s)
        for request, logits in result.answered:
            self._answer(request, logits)
        for failed, error in result.failed.items():
            if failed in self._unanswered:
                self._answer(self._unanswered[failed], error)
        return True

    def _note_begun(self, result: StepResult, *, seconds: float, now_s: float) -> None:
        """Note what had its first step; begun are also logits requests, and those that come back."""
        with self._changed:
            starting = [self._waiting[request] for request in result.begun if request in self._waiting]
            self._admission.note_step(
                seconds,
                num_begun=sum(ticket.num_seqs for ticket in starting),
                full=result.full,
                num_waiting=self._engine.num_waiting,
                now_s=now_s,
            )
            for ticket in starting:
                ticket.submission.begun = True
                self._metrics.queued(max(0.0, now_s - seconds - ticket.submission.arrived_s))
                self._leave_queue(ticket.sequence)

    def _leave_queue(self, request: Request) -> None:
        """Take a sequence out of those that wait for their first step, if it does."""
        ticket = self._waiting.pop(request, None)
        if ticket is not None:
            priority = ticket.sequence.priority
            self._admission.begin(ticket.num_seqs, num_tokens=ticket.num_tokens, priority=priority)

    def _refuse_overdue(self) -> None:
        """End the requests that have waited too long, and did not begin with this step either."""
        limit_s = self._admission.limits.max_wait_s
        now_s = self._engine.clock()
        if limit_s is None or now_s - self._oldest_s <= limit_s:
            return
        overdue: list[RequestOutput] = []
        refused: dict[int, Overloaded] = {}     # by submission
        with self._changed:
            self._oldest_s = math.inf
            for ticket in self._waiting.values():
                submission, sequence = ticket.submission, ticket.sequence
                if submission.begun:
                    continue
                if now_s - submission.arrived_s <= limit_s or sequence not in self._tickets:  # came meanwhile
                    self._oldest_s = min(self._oldest_s, submission.arrived_s)
                    continue
                if id(submission) not in refused:
                    refused[id(submission)] = self._overdue(limit_s, now_s=now_s)
                overdue.append((sequence, refused[id(submission)]))
        if overdue:
            self._engine.remove(sequence for sequence, _ in overdue)
            self._hand_over(overdue, now_s=now_s)

    def _overdue(self, limit_s: float, *, now_s: float) -> Overloaded:
        return self._admission.refusal(
            Reason.QUEUE_TIMEOUT,
            f"the request has waited for {limit_s:g} s, which is the limit",
            remedy="try again later, or raise --max-queue-wait-s",
            now_s=now_s,
        )

    def _outputs(self, result: StepResult) -> list[RequestOutput]:
        outputs: list[RequestOutput] = [
            (self._tickets[request].sequence, error)
            for request, error in result.failed.items()
            if request in self._tickets
        ]
        for sequence in result.advanced:
            delta = sequence.take_delta()
            if delta is not None:
                outputs.append((sequence, delta))
        return outputs

    def _hand_over(self, outputs: Sequence[RequestOutput], *, now_s: float) -> None:
        batches: defaultdict[Outbox, list[RequestOutput]] = defaultdict(list)
        for sequence, content in outputs:
            ticket = self._tickets[sequence]
            batches[ticket.outbox].append((sequence, content))
            self._note(sequence, content, ticket, now_s=now_s)
        for outbox, batch in batches.items():
            try:
                outbox.deliver(batch)
            except RuntimeError:  # its event loop is closed: nobody will read these any more
                for sequence, _ in batch:
                    self.cancel(sequence)

    def _note(
        self, sequence: TokenSequence, content: Delta | GenserveError, ticket: _Ticket, *, now_s: float
    ) -> None:
        if isinstance(content, GenserveError):
            if not isinstance(content, Overloaded):     # which is counted where it is made
                self._metrics.request_failed()
            self._end(sequence)
            return
        self._metrics.generated(len(content.token_ids))
        if sequence.first_token_s is None and content.token_ids:
            sequence.first_token_s = now_s
            self._metrics.first_token(
                seconds=now_s - ticket.submission.arrived_s,
                prompt_tokens=sequence.num_prompt_tokens,
                cached_tokens=sequence.num_cached_tokens,
            )
        if content.finish_reason is not None:
            seconds, num_tokens = now_s - ticket.submission.arrived_s, sequence.num_new_tokens
            logger.debug("finished: %s, %d tokens in %.3f s", content.finish_reason, num_tokens, seconds)
            self._metrics.request_finished(
                content.finish_reason,
                seconds=seconds,
                decode_seconds=now_s - (now_s if sequence.first_token_s is None else sequence.first_token_s),
                new_tokens=num_tokens,
            )
            self._end(sequence)

    def _answer(self, request: LogitsRequest, content: LogitsArray | GenserveError) -> None:
        if isinstance(content, GenserveError):
            self._metrics.request_failed()
        self._end(request)
        try:
            request.answer(content)
        except Exception:
            logger.exception("the receiver of logits failed")

    def _end(self, request: Request) -> None:
        num_seqs = 1
        with self._idle:
            if self._unanswered.pop(request, None) is None:
                num_seqs = self._tickets.pop(request).num_seqs
                self._leave_queue(request)
            self._admission.leave(num_seqs)
            if not self._admission.num_accepted:
                self._idle.notify_all()

    def _end_all(self, error: GenserveError) -> None:
        self._take_arrivals()
        self._engine.remove([*self._tickets, *self._unanswered])
        self._report_occupancy()
        outputs = [(ticket.sequence, error) for ticket in self._tickets.values()]
        self._hand_over(outputs, now_s=self._engine.clock())
        for request in tuple(self._unanswered.values()):
            self._answer(request, error)


def _ticket(sequence: TokenSequence, submission: _Submission, outbox: Outbox) -> _Ticket:
    num_seqs, num_tokens = 1, sequence.num_prompt_tokens
    if sequence.beams is not None:
        # The beams share one prompt, and there may be more of them than answers.
        first = sequence is sequence.beams.answers[0]
        num_seqs = len(sequence.beams.beams) - len(sequence.beams.answers) + 1 if first else 1
        num_tokens = num_tokens if first else 0
    return _Ticket(
        sequence=sequence, submission=submission, outbox=outbox, num_seqs=num_seqs, num_tokens=num_tokens
    )
