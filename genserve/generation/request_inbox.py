"""Request inbox: accepts requests from any thread, or rejects them, and hands them to an engine's thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeAlias

from genserve.completion import Delta
from genserve.errors import Closed, GenserveError, ModelNotReady, Overloaded
from genserve.generation.admission_control import AdmissionControl
from genserve.generation.engine_request import LogitsRequest, Request, TokenSequence

# An error is the last output of its sequence, like a delta with a finish reason.
RequestOutput: TypeAlias = tuple[TokenSequence, Delta | GenserveError]


class OutputSink(Protocol):
    """Receives the outputs of each step: one call per step and sink, not one per token."""

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Take over the outputs; called on the engine's thread, must not block."""


@dataclass(slots=True, kw_only=True)
class Submission:
    """Token sequences that were submitted together."""

    arrived_s: float        # before they were prepared
    num_open: int           # how many have not ended
    most_tokens: int = 0    # of those that have ended
    started: bool = False   # one of them has had its first step


@dataclass(slots=True, kw_only=True)
class RequestState:
    """An accepted token sequence that has not ended."""

    sequence: TokenSequence
    submission: Submission
    sink: OutputSink
    num_seqs: int           # that it counts for; the first answer of a beam search counts for the other beams
    num_tokens: int         # of its prompt; of a beam search only the first answer counts them


@dataclass(slots=True)
class Arrivals:
    """Requests that arrived or were cancelled since the engine's thread took the last ones."""

    sequences: list[RequestState] = field(default_factory=list)
    logits_requests: list[LogitsRequest] = field(default_factory=list)
    cancelled: set[Request] = field(default_factory=set)


class WaitingSequences:
    """The accepted sequences that wait for their first step, in the order of arrival.

    Counts them in the admission control, and finds those that have waited too long. Its caller holds a lock.
    """

    def __init__(self, admission: AdmissionControl) -> None:
        self._admission = admission
        self._states: dict[Request, RequestState] = {}
        self._oldest_s = math.inf           # none of them came earlier

    def __len__(self) -> int:
        return len(self._states)

    def add(self, states: Iterable[RequestState]) -> None:
        """Append the sequences of a submission."""
        for state in states:
            priority = state.sequence.priority
            self._admission.wait(state.num_seqs, num_tokens=state.num_tokens, priority=priority)
            self._states[state.sequence] = state
            self._oldest_s = min(self._oldest_s, state.submission.arrived_s)

    def remove(self, request: Request) -> None:
        """Remove a sequence that starts or has ended; does nothing if it does not wait."""
        state = self._states.pop(request, None)
        if state is not None:
            priority = state.sequence.priority
            self._admission.start(state.num_seqs, num_tokens=state.num_tokens, priority=priority)

    def among(self, requests: Iterable[Request]) -> list[RequestState]:
        """Return those of the requests that wait."""
        return [self._states[request] for request in requests if request in self._states]

    @property
    def next_overdue_s(self) -> float:
        """When the next one will have waited too long; infinite: never. May be read without the lock."""
        return self._overdue_s(self._oldest_s)

    def overdue(self, scheduled: Container[Request], *, now_s: float) -> list[RequestOutput]:
        """Return the errors of those in `scheduled` that have waited too long; they remain until removed."""
        overdue: list[RequestOutput] = []
        errors: dict[int, Overloaded] = {}      # by submission
        self._oldest_s = math.inf
        for state in self._states.values():
            submission, sequence = state.submission, state.sequence
            if submission.started:
                continue
            if now_s <= self._overdue_s(submission.arrived_s) or sequence not in scheduled:
                self._oldest_s = min(self._oldest_s, submission.arrived_s)
                continue
            if id(submission) not in errors:
                errors[id(submission)] = self._admission.timeout(now_s=now_s)
            overdue.append((sequence, errors[id(submission)]))
        return overdue

    def _overdue_s(self, arrived_s: float) -> float:
        limit_s = self._admission.limits.max_wait_s
        return math.inf if limit_s is None else arrived_s + limit_s


class ReservationKeeper(Protocol):
    """Keeps the places of reservations."""

    def check_reserved(self, reservation: Reservation) -> None:
        """See `Reservation.check`."""

    def release(self, reservation: Reservation) -> None:
        """See `Reservation.release`."""


class Reservation:
    """Places that `RequestInbox.reserve` keeps for a request while its prompts are prepared.

    A context manager; safe from any thread.

    Attributes:
        count: how many places.
        priority: of the request.
        arrived_s: when it came, by the engine's clock; its wait starts there.
        queued: whether other requests were being prepared when it came; if not, it waits for none of them.
    """

    def __init__(
        self, inbox: ReservationKeeper, count: int, *, priority: int, arrived_s: float, queued: bool
    ) -> None:
        self.count = count
        self.priority = priority
        self.arrived_s = arrived_s
        self.queued = queued
        self.released = False
        self._inbox = inbox

    def check(self) -> None:
        """Raise the error of `submit` for a closed engine or a wait that was too long.

        Called when a thread is free, before it prepares the prompts.
        """
        self._inbox.check_reserved(self)

    def release(self) -> None:
        """Free the places; a second call does nothing."""
        self._inbox.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.release()


class RequestInbox:
    """Accepts or rejects requests, and keeps them until the engine's thread takes them.

    Public methods are safe from any thread; protected ones are for the engine's thread. Times are those of
    the engine's clock.
    """

    def __init__(self, *, clock: Callable[[], float], admission: AdmissionControl) -> None:
        self._clock = clock
        lock = threading.RLock()
        self._changed = threading.Condition(lock)   # the engine's thread waits for it
        self._idle = threading.Condition(lock)
        # Guarded by the conditions.
        self._admission = admission
        self._arrivals = Arrivals()
        self._waiting = WaitingSequences(admission)
        self._num_awaited = 1               # how many arrivals wake the engine's thread
        self._closing = False
        self._failure: GenserveError | None = None

    @property
    def num_accepted(self) -> int:
        """Token sequences and logits requests that have not ended, waiting ones included.

        A beam search counts as many as it has beams.
        """
        return self._admission.num_accepted

    @property
    def capacity(self) -> int:
        """How many may run, wait and be prepared together."""
        return self._admission.capacity

    @property
    def num_preparing(self) -> int:
        """Places reserved for requests whose prompts are being prepared."""
        return self._admission.num_preparing

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the sequences that wait for their first step."""
        return self._admission.num_tokens

    @property
    def now_s(self) -> float:
        """The time of the engine's clock, to which deadlines refer."""
        return self._clock()

    def reserve(self, count: int, *, priority: int = 0, is_resumed: bool = False) -> Reservation:
        """Keep `count` places for a request while its prompts are prepared.

        A resumed request gets them however long the queue is: a part of its answer has been sent.

        Raises:
            Closed, ModelNotReady, Overloaded: as `submit` would for that many short prompts.
        """
        now_s = self._clock()
        with self._changed:
            self._check_open()
            if not is_resumed:
                self._admission.check(count, num_tokens=0, priority=priority, now_s=now_s)
            queued = self._admission.num_preparing > 0
            self._admission.reserve(count, priority=priority)
        return Reservation(self, count, priority=priority, arrived_s=now_s, queued=queued)

    def check_reserved(self, reservation: Reservation) -> None:
        """See `Reservation.check`."""
        limit_s = self._admission.limits.max_wait_s
        now_s = self._clock()
        with self._changed:
            self._check_open()
            if limit_s is not None and reservation.queued and now_s - reservation.arrived_s > limit_s:
                raise self._admission.timeout(now_s=now_s)

    def release(self, reservation: Reservation) -> None:
        """See `Reservation.release`."""
        with self._changed:
            if not reservation.released:
                reservation.released = True
                self._admission.release(reservation.count, priority=reservation.priority)

    def submit(
        self, *sequences: TokenSequence, sink: OutputSink, reservation: Reservation | None = None
    ) -> None:
        """Accept the token sequences of a request, all of them or none; their outputs go to `sink`.

        Resumed ones are accepted however long the queue is, see `reserve`.

        The reservation is released in any case. If none of the sequences has its first step within the limit,
        they end with Overloaded too.

        Raises:
            Closed: `close` was called.
            ModelNotReady: the engine's thread has died.
            Overloaded: the queue is full, or they would wait too long.
        """
        now_s = self._clock()
        arrived_s = reservation.arrived_s if reservation else now_s
        submission = Submission(arrived_s=arrived_s, num_open=len(sequences))
        states = [_state(sequence, submission, sink) for sequence in sequences]
        num_seqs = sum(state.num_seqs for state in states)
        with self._changed:
            if reservation is not None:
                self.release(reservation)
            self._check_open()
            if not sequences[0].is_resumed:
                self._admission.check(
                    num_seqs,
                    num_tokens=sum(state.num_tokens for state in states),
                    priority=sequences[0].priority,
                    now_s=now_s,
                )
            self._admission.accept(num_seqs)
            self._waiting.add(states)
            self._arrivals.sequences.extend(states)
            self._notify_arrival()

    def submit_logits(self, requests: Sequence[LogitsRequest]) -> None:
        """Accept logits requests, all of them or none; raises the errors of `submit`.

        Requests that come at the same pace share their steps. A request that starts with the tokens of an
        earlier one continues there. Each may be the next token of a loop that started long ago, so only the
        limit on the number of requests applies to them.
        """
        now_s = self._clock()
        for request in requests:
            request.submitted_s = now_s
        with self._changed:
            self._check_open()
            self._admission.check_count(len(requests), now_s=now_s)
            self._admission.accept(len(requests))
            self._arrivals.logits_requests.extend(requests)
            self._notify_arrival()

    def cancel(self, request: Request) -> None:
        """Drop a token sequence or a logits request before the next step; does nothing if it has ended.

        Dropping one answer of a beam search drops all.
        """
        with self._changed:
            self._arrivals.cancelled.add(request)
            self._changed.notify()

    def drain(self, *, timeout_s: float) -> None:
        """Wait until every accepted request has ended, at most `timeout_s`; new ones are still accepted."""
        with self._idle:
            self._idle.wait_for(lambda: not self._admission.num_accepted, timeout_s)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise ModelNotReady(self._failure.message, remedy=self._failure.remedy)
        if self._closing:
            raise Closed(
                "the model is being unloaded, or the server is stopping",
                remedy="try again when the model is ready",
            )

    @property
    def _num_arrivals(self) -> int:
        return len(self._arrivals.sequences) + len(self._arrivals.logits_requests)

    def _notify_arrival(self) -> None:
        if self._num_arrivals >= self._num_awaited:
            self._changed.notify()

    def _wait_for_work(self, *, busy: bool) -> bool:
        """Wait until a request arrives, unless the thread is busy; False once the inbox closes."""
        with self._changed:
            while not (busy or self._num_arrivals or self._closing):
                self._arrivals.cancelled.clear()
                self._changed.wait()
            return not self._closing

    def _wait_for_change(self, seconds: float, *, num_awaited: int = 1) -> None:
        """Wait for `num_awaited` arrivals, a cancellation or the end of the thread, at most `seconds`."""
        with self._changed:
            self._num_awaited = num_awaited
            self._changed.wait_for(
                lambda: self._num_arrivals >= num_awaited or self._arrivals.cancelled or self._closing,
                seconds,
            )
            self._num_awaited = 1

    def _take_arrivals(self) -> Arrivals:
        with self._changed:
            arrivals, self._arrivals = self._arrivals, Arrivals()
        return arrivals

    def _start(
        self, started: Iterable[Request], *, seconds: float, full: bool, num_waiting: int, now_s: float
    ) -> list[RequestState]:
        """Note a step; return the sequences that had their first step with it.

        Args:
            started: requests that left the scheduler's queue, logits requests and preempted ones included.
            seconds: that the step took.
            full: whether the first waiting request found no place, or too few blocks.
            num_waiting: requests in the scheduler's queue.
            now_s: when the step ended.
        """
        with self._changed:
            states = self._waiting.among(started)
            self._admission.note_step(
                seconds,
                num_started=sum(state.num_seqs for state in states),
                full=full,
                num_waiting=num_waiting,
                now_s=now_s,
            )
            for state in states:
                state.submission.started = True
                state.sequence.started_s = max(now_s - seconds, state.submission.arrived_s)
                self._waiting.remove(state.sequence)
        return states

    def _overdue(self, scheduled: Container[Request]) -> list[RequestOutput]:
        """Return the errors of requests in the engine that have waited too long for their first step."""
        now_s = self._clock()
        if now_s <= self._waiting.next_overdue_s:
            return []
        with self._changed:
            return self._waiting.overdue(scheduled, now_s=now_s)

    def _leave(self, request: Request, *, num_seqs: int, started_s: float | None = None) -> None:
        """Count a request that has ended; `started_s` is when a sequence had its first step."""
        with self._idle:
            self._waiting.remove(request)
            self._admission.leave(num_seqs)
            if started_s is not None:
                now_s = self._clock()
                self._admission.note_end(now_s - started_s, now_s=now_s)
            if not self._admission.num_accepted:
                self._idle.notify_all()


def _state(sequence: TokenSequence, submission: Submission, sink: OutputSink) -> RequestState:
    num_seqs, num_tokens = 1, len(sequence.token_ids)
    search = sequence.search
    if search is not None:
        # The beams share one prompt, and there may be more beams than answers.
        first = sequence is search.answers[0]
        num_seqs = len(search.beams) - len(search.answers) + 1 if first else 1
        num_tokens = num_tokens if first else 0
    return RequestState(
        sequence=sequence, submission=submission, sink=sink, num_seqs=num_seqs, num_tokens=num_tokens
    )
