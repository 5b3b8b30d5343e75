"""Input queue: accepts requests from any thread, or rejects them, and keeps them for an engine's thread."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from genserve.engine.admission_control import AdmissionControl
from genserve.engine.engine_request import LogitsRequest, Request, Submission, SubmittedSequence
from genserve.engine.generation_request import GenerationRequest
from genserve.engine.prefix_cache import StoredBlocks
from genserve.errors import Closed, GenserveError, ModelNotReady, Overloaded
from genserve.request_context import NO_KEY, KeyShare

SequenceT = TypeVar("SequenceT", bound=SubmittedSequence)

_MAX_STORED = 4  # parts of prompts that were read from files and wait for the end of a step


@dataclass(slots=True)
class Arrivals(Generic[SequenceT]):
    """What has arrived for the engine's thread since it took the last arrivals."""

    sequences: list[SequenceT] = field(default_factory=list)
    logits_requests: list[LogitsRequest] = field(default_factory=list)
    cancelled: set[GenerationRequest | LogitsRequest] = field(default_factory=set)
    ending_reasoning: set[GenerationRequest] = field(default_factory=set)
    stored: list[StoredBlocks] = field(default_factory=list)
    adapters_changed: bool = False  # one that sequences wait for is in memory, or never will be

    @property
    def num_requests(self) -> int:
        """How many requests arrived."""
        return len(self.sequences) + len(self.logits_requests)


class ReservationKeeper(Protocol):
    """Keeps the slots of reservations."""

    def check_reserved(self, reservation: Reservation) -> None:
        """See `Reservation.check`."""

    def release(self, reservation: Reservation) -> None:
        """See `Reservation.release`."""


class Reservation:
    """Slots that `InputQueue.reserve` keeps for a request while its prompts are prepared.

    A context manager; safe from any thread.

    Attributes:
        count: the number of slots.
        priority: the request's priority.
        share: the share of its API key.
        arrived_s: when the request came, by the engine's clock; its wait starts then.
        queued: whether other requests were being prepared when the request came, so that it waits for them.
    """

    def __init__(
        self,
        queue: ReservationKeeper,
        count: int,
        *,
        priority: int,
        share: KeyShare = NO_KEY,
        arrived_s: float,
        queued: bool,
    ) -> None:
        self.count = count
        self.priority = priority
        self.share = share
        self.arrived_s = arrived_s
        self.queued = queued
        self.released = False
        self._queue = queue

    def check(self) -> None:
        """Raise the error of `submit` for a closed engine or a wait that was too long.

        Called when a thread is free, before it prepares the prompts.
        """
        self._queue.check_reserved(self)

    def release(self) -> None:
        """Free the slots; a second call does nothing."""
        self._queue.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.release()


class InputQueue(Generic[SequenceT]):
    """Accepts or rejects requests, and keeps them until the engine's thread takes them.

    The queue counts requests until they end. Its methods are safe from any thread; the methods after `close`
    are for the engine's thread. Times are by the engine's clock.

    Attributes:
        admission: the counts of the requests.
    """

    def __init__(self, *, clock: Callable[[], float], admission: AdmissionControl) -> None:
        self._clock = clock
        max_wait_s = admission.limits.max_wait_s
        self._max_wait_s = math.inf if max_wait_s is None else max_wait_s
        self._lock = threading.RLock()  # costs less to enter than its conditions
        self._changed = threading.Condition(self._lock)  # the engine's thread waits for it
        self._idle = threading.Condition(self._lock)
        self._taken = threading.Condition(self._lock)  # of stored blocks
        # Guarded by the lock.
        self.admission = admission
        self._arrivals: Arrivals[SequenceT] = Arrivals()
        self._oldest_s = math.inf  # no sequence that waits for its first step came earlier
        self._num_awaited = 1  # how many arrivals wake the engine's thread
        self._closing = False
        self._failure: GenserveError | None = None

    @property
    def num_free(self) -> int:
        """How many requests with a short prompt would be accepted now."""
        with self._lock:
            return self.admission.num_free(now_s=self._clock())

    @property
    def seconds_per_slot(self) -> float | None:
        """The time in which a slot becomes free while requests wait; None: unknown."""
        with self._lock:
            return self.admission.seconds_per_slot(now_s=self._clock())

    @property
    def is_open(self) -> bool:
        """Whether it accepts requests; False after `close` or `fail`."""
        return not self._closing and self._failure is None

    def reserve(
        self, count: int, *, priority: int = 0, share: KeyShare = NO_KEY, is_resumed: bool = False
    ) -> Reservation:
        """Keep `count` slots for a request while its prompts are prepared.

        A resumed request gets them however long the queue is: a part of its answer has been sent.

        Raises:
            Closed, ModelNotReady, Overloaded: as `submit` would for that many short prompts.
        """
        now_s = self._clock()
        with self._lock:
            self._check_open()
            if not is_resumed:
                self.admission.check(count, num_tokens=0, priority=priority, now_s=now_s, share=share)
            queued = self.admission.num_preparing > 0
            self.admission.reserve(count, priority=priority, share=share)
        return Reservation(self, count, priority=priority, share=share, arrived_s=now_s, queued=queued)

    def check_reserved(self, reservation: Reservation) -> None:
        """See `Reservation.check`."""
        now_s = self._clock()
        with self._lock:
            self._check_open()
            if reservation.queued and now_s - reservation.arrived_s > self._max_wait_s:
                raise self.admission.timeout(now_s=now_s)

    def release(self, reservation: Reservation) -> None:
        """See `Reservation.release`."""
        with self._lock:
            if not reservation.released:
                reservation.released = True
                self.admission.release(
                    reservation.count, priority=reservation.priority, share=reservation.share
                )

    def check(self, sequences: Sequence[SubmittedSequence]) -> None:
        """Raise the errors of `submit`, but for the number of the sequences, which may be reserved."""
        first = sequences[0]
        with self._lock:
            self._check_open()
            if not first.is_resumed:
                self.admission.check(
                    0,
                    num_tokens=sum(map(_num_waiting_tokens, sequences)),
                    priority=first.priority,
                    now_s=self._clock(),
                    share=first.share,
                )

    def submit(self, sequences: Sequence[SequenceT], *, reservation: Reservation | None = None) -> None:
        """Accept the sequences of a request, all of them or none.

        Resumed sequences are accepted however long the queue is, see `reserve`.

        The reservation is released in any case. If none of the sequences has its first step within the limit,
        they are `overdue`.

        Raises:
            Closed: `close` was called.
            ModelNotReady: the engine's thread has died.
            Overloaded: the queue is full, or they would wait too long.
        """
        now_s = self._clock()
        arrived_s = reservation.arrived_s if reservation else now_s
        submission = Submission(arrived_s=arrived_s, num_open=len(sequences))
        for sequence in sequences:
            _attach(sequence, submission)
        num_seqs = sum(sequence.num_accepted_seqs for sequence in sequences)
        first = sequences[0]
        with self._lock:
            if reservation is not None:
                self.release(reservation)
            self._check_open()
            if not first.is_resumed:
                num_tokens = sum(sequence.num_waiting_tokens for sequence in sequences)
                self.admission.check(
                    num_seqs,
                    num_tokens=num_tokens,
                    priority=first.priority,
                    now_s=now_s,
                    share=first.share,
                )
            self.admission.accept(num_seqs, share=first.share)
            for sequence in sequences:
                self.admission.wait(
                    sequence.num_accepted_seqs,
                    num_tokens=sequence.num_waiting_tokens,
                    priority=sequence.priority,
                )
            self._oldest_s = min(self._oldest_s, arrived_s)
            self._arrivals.sequences.extend(sequences)
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
        with self._lock:
            self._check_open()
            self.admission.check_count(len(requests), now_s=now_s)
            self.admission.accept(len(requests), share=requests[0].share)
            self._arrivals.logits_requests.extend(requests)
            self._notify_arrival()

    def restore(self, stored: StoredBlocks) -> None:
        """Pass blocks of a prompt that is submitted next, as soon as few earlier ones wait for a step.

        So few of them are in memory twice. Raises Closed and ModelNotReady as `submit` does.
        """
        with self._lock:
            self._taken.wait_for(lambda: len(self._arrivals.stored) < _MAX_STORED or not self.is_open)
            self._check_open()
            self._arrivals.stored.append(stored)
            self._changed.notify()

    def cancel(self, request: GenerationRequest | LogitsRequest) -> None:
        """Drop the open sequences of a request before the next step."""
        with self._lock:
            self._arrivals.cancelled.add(request)
            self._changed.notify()

    def adapters_changed(self) -> None:
        """Have the engine's thread look for sequences that need not wait for their adapter any more."""
        with self._lock:
            self._arrivals.adapters_changed = True
            self._changed.notify()

    def end_reasoning(self, request: GenerationRequest) -> None:
        """End the reasoning of the open sequences of a request at their next token."""
        with self._lock:
            self._arrivals.ending_reasoning.add(request)

    def drain(self, *, timeout_s: float) -> None:
        """Wait until every accepted request has ended, at most `timeout_s`; new ones are still accepted."""
        with self._lock:
            self._idle.wait_for(lambda: not self.admission.num_accepted, timeout_s)

    def close(self) -> None:
        """Reject all further requests with `Closed`, and wake the engine's thread."""
        with self._lock:
            self._closing = True
            self._changed.notify()
            self._taken.notify_all()

    def fail(self, failure: GenserveError) -> None:
        """Reject all further requests with `ModelNotReady`, because the engine's thread dies."""
        with self._lock:
            self._failure = failure
            self._taken.notify_all()

    def wait_for_work(self, *, busy: bool) -> bool:
        """Wait until a request arrives, unless the thread is busy; False once the queue is closed."""
        with self._lock:
            while not (busy or self._arrivals.num_requests or self._arrivals.stored or self._closing):
                self._arrivals.cancelled.clear()
                self._arrivals.ending_reasoning.clear()
                self._changed.wait()
            return not self._closing

    def wait_for_change(self, seconds: float, *, num_awaited: int = 1) -> None:
        """Wait for `num_awaited` arrivals, a change of adapters, a cancellation or the end of the thread.

        It waits for `seconds` at most.
        """
        with self._lock:
            self._num_awaited = num_awaited
            self._changed.wait_for(
                lambda: (
                    self._arrivals.num_requests >= num_awaited
                    or self._arrivals.adapters_changed
                    or self._arrivals.cancelled
                    or self._closing
                ),
                seconds,
            )
            self._num_awaited = 1

    def pop(self) -> Arrivals[SequenceT]:
        """Return what has arrived since the last call; the requests still count until `remove`."""
        with self._lock:
            arrivals, self._arrivals = self._arrivals, Arrivals()
            if arrivals.stored:
                self._taken.notify_all()
        return arrivals

    def record_step(
        self, started: Iterable[Request], *, seconds: float, full: bool, num_waiting: int, now_s: float
    ) -> list[SubmittedSequence]:
        """Record a step; return the sequences that had their first step with it.

        Args:
            started: requests that left the scheduler's queue, logits requests and preempted ones included.
            seconds: the duration of the step.
            full: whether the first waiting request found no slot, or too few blocks.
            num_waiting: requests that wait for blocks and a slot.
            now_s: when the step ended.
        """
        sequences = [s for s in started if isinstance(s, SubmittedSequence) and s.started_s is None]
        with self._lock:
            self.admission.prediction.record_step(
                seconds,
                num_started=sum(sequence.num_accepted_seqs for sequence in sequences),
                full=full,
                num_waiting=num_waiting,
                now_s=now_s,
            )
            for sequence in sequences:
                submission = sequence.submission
                submission.has_started = True
                sequence.started_s = max(now_s - seconds, submission.arrived_s)
                self._stop_waiting(sequence)
        return sequences

    def record_without_adapters(self, counts: Counter[int]) -> None:
        """Record how many of the waiting sequences and beams wait for adapters, by priority."""
        with self._lock:
            self.admission.without_adapters = counts

    @property
    def next_overdue_s(self) -> float:
        """A time before which no sequence will have waited too long; infinite: none ever will."""
        return self._oldest_s + self._max_wait_s

    def overdue(self, sequences: Iterable[SequenceT]) -> list[tuple[SequenceT, Overloaded]]:
        """Return the sequences that have waited too long for their first step, with their errors.

        `sequences` are all that the engine has. Once one sequence of a submission has had its first step, the
        other ones may wait as long as it takes.
        """
        now_s = self._clock()
        if now_s <= self.next_overdue_s:
            return []
        overdue: list[tuple[SequenceT, Overloaded]] = []
        errors: dict[int, Overloaded] = {}  # the error of each submission
        with self._lock:
            self._oldest_s = min((s.submission.arrived_s for s in self._arrivals.sequences), default=math.inf)
            for sequence in sequences:
                submission = sequence.submission
                if submission.has_started:
                    continue
                if now_s <= submission.arrived_s + self._max_wait_s:
                    self._oldest_s = min(self._oldest_s, submission.arrived_s)
                    continue
                if id(submission) not in errors:
                    errors[id(submission)] = self.admission.timeout(now_s=now_s)
                overdue.append((sequence, errors[id(submission)]))
        return overdue

    def remove(self, request: Request) -> None:
        """Stop counting a request, which has ended."""
        with self._lock:
            num_seqs = 1
            if isinstance(request, SubmittedSequence):
                num_seqs = request.num_accepted_seqs
                if request.started_s is None:
                    self._stop_waiting(request)
                else:
                    now_s = self._clock()
                    self.admission.prediction.record_end(now_s - request.started_s, now_s=now_s)
            self.admission.leave(num_seqs, share=request.share)
            if not self.admission.num_accepted:
                self._idle.notify_all()

    def _stop_waiting(self, sequence: SubmittedSequence) -> None:
        """Stop counting a sequence among the waiting ones: it has had its first step, or ends before."""
        self.admission.start(
            sequence.num_accepted_seqs, num_tokens=sequence.num_waiting_tokens, priority=sequence.priority
        )

    def _check_open(self) -> None:
        if self._failure is not None:
            raise ModelNotReady(self._failure.message, remedy=self._failure.remedy)
        if self._closing:
            raise Closed(
                "the model is being unloaded, or the server is stopping",
                remedy="try again when the model is ready",
            )

    def _notify_arrival(self) -> None:
        if self._arrivals.num_requests >= self._num_awaited:
            self._changed.notify()


def _attach(sequence: SubmittedSequence, submission: Submission) -> None:
    """Set what admission control counts a sequence for: the first choice of a beam search stands for all.

    The beams share one prompt, and there may be more beams than choices.
    """
    group = sequence.group
    is_first = sequence is group.choices[0]
    sequence.submission = submission
    sequence.num_accepted_seqs = group.num_seqs - len(group.choices) + 1 if is_first else 1
    sequence.num_waiting_tokens = _num_waiting_tokens(sequence)


def _num_waiting_tokens(sequence: SubmittedSequence) -> int:
    return len(sequence.token_ids) if sequence is sequence.group.choices[0] else 0
