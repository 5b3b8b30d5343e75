"""Loop: the thread that owns an engine, and the door to it from every other thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from genserve.errors import Closed, GenserveError, ModelFailed, ModelNotReady, Overloaded
from genserve.generation.engine import Engine, StepResult
from genserve.generation.logits_model import LogitsArray
from genserve.generation.logits_request import LogitsRequest
from genserve.generation.residents import Occupant
from genserve.generation.token_sequence import TokenSequence
from genserve.metrics import GenerationMetrics
from genserve.request import Delta

__all__ = ["EngineLoop", "Outbox", "Parcel"]

logger = logging.getLogger(__name__)

# How long a step may wait for loops that always come back at once, as a share of the last decode step.
GATHER = 0.5
GATHER_BESIDE_GENERATION = 0.1

# An error is the last parcel of its sequence, as a delta with a finish reason is.
Parcel: TypeAlias = tuple[TokenSequence, Delta | GenserveError]


class Outbox(Protocol):
    """Where the parcels of one step go: one call per step and outbox, not one per token."""

    def deliver(self, parcels: Sequence[Parcel]) -> None:
        """Take over the parcels; called on the engine's thread, must not block."""


@dataclass(slots=True, kw_only=True)
class _Ticket:
    """What the loop knows of a token sequence that has not ended."""

    outbox: Outbox
    submitted_s: float


class EngineLoop:
    """The thread that owns an engine.

    `submit`, `submit_logits`, `cancel`, `drain`, `close` and the properties are safe from any thread. Every
    sequence that `submit` accepts ends with exactly one last parcel, and every logits request is
    answered exactly once, unless it is cancelled: then nothing follows.
    """

    def __init__(
        self, engine: Engine, *, name: str, num_slots: int, max_waiting: int, metrics: GenerationMetrics
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._capacity = num_slots + max_waiting
        lock = threading.RLock()
        self._changed = threading.Condition(lock)   # the thread waits for it
        self._idle = threading.Condition(lock)
        # Guarded by the conditions.
        self._arriving: list[tuple[TokenSequence, Outbox] | LogitsRequest] = []
        self._num_awaited = 1               # arrivals for which the thread is worth waking
        self._cancelled: set[Occupant] = set()
        self._num_accepted = 0
        self._closing = False
        self._failure: GenserveError | None = None
        # The thread's own.
        self._tickets: dict[TokenSequence, _Ticket] = {}
        self._unanswered: set[LogitsRequest] = set()
        self._decode_s = 0.0                # of the last decode step
        self._ended_s: deque[float] = deque(maxlen=64)
        self._num_steps = 0
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; False after `close` or a failure that nothing caught."""
        return self._thread.is_alive() and not self._closing and self._failure is None

    @property
    def num_running(self) -> int:
        """Token sequences and logits requests that are in a slot and have something to compute now."""
        return self._engine.num_running

    @property
    def num_accepted(self) -> int:
        """Token sequences and logits requests not ended, those that wait for a slot included."""
        return self._num_accepted

    @property
    def capacity(self) -> int:
        """How many may run and wait together."""
        return self._capacity

    @property
    def now_s(self) -> float:
        """What the engine's clock says, by which deadlines are told."""
        return self._engine.clock()

    @property
    def num_steps(self) -> int:
        """Forwards run so far."""
        return self._num_steps

    def longest(self, num_sequences: int) -> int:
        """Return how many tokens each of so many sequences that need each other may have."""
        return self._engine.longest(num_sequences)

    def submit(self, *sequences: TokenSequence, outbox: Outbox) -> None:
        """Accept token sequences, all of them or none; their parcels go to `outbox`.

        Raises:
            Closed: the loop was closed.
            ModelNotReady: its thread has died.
            Overloaded: as many as may wait are waiting.
        """
        self._accept([(sequence, outbox) for sequence in sequences])

    def submit_logits(self, requests: Sequence[LogitsRequest]) -> None:
        """Accept logits requests, all of them or none; raises what `submit` raises.

        Requests that come at the same pace share their steps. One that begins with what an earlier
        one has computed goes on there.
        """
        now_s = self._engine.clock()
        for request in requests:
            request.submitted_s = now_s
        self._accept(requests)

    def _accept(self, arrivals: Sequence[tuple[TokenSequence, Outbox] | LogitsRequest]) -> None:
        with self._changed:
            if self._failure is not None:
                raise ModelNotReady(self._failure.message)
            if self._closing:
                raise Closed("the model is being unloaded or the server stops")
            self._check_room(len(arrivals))
            self._num_accepted += len(arrivals)
            self._arriving.extend(arrivals)
            if len(self._arriving) >= self._num_awaited:
                self._changed.notify()

    def check_room(self, count: int) -> None:
        """Raise what `submit` would raise if so many came now; for work that precedes `submit`."""
        with self._changed:
            self._check_room(count)

    def _check_room(self, count: int) -> None:
        if self._num_accepted + count > self._capacity:
            raise Overloaded(
                f"{self._num_accepted} requests are running or waiting, the limit is {self._capacity}",
                retry_after_s=self._retry_after_s(),
                remedy="try again later, or raise --max-queue",
            )

    def cancel(self, occupant: Occupant) -> None:
        """Drop a token sequence or a logits request before the next step; fine if it has ended already.

        With one answer of a beam search all of them leave.
        """
        with self._changed:
            self._cancelled.add(occupant)
            self._changed.notify()

    def drain(self, *, timeout_s: float) -> None:
        """Wait until all that was accepted has ended, or for so long; what comes meanwhile is accepted."""
        with self._idle:
            self._idle.wait_for(lambda: not self._num_accepted, timeout_s)

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
                if not self._step():
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
        """Wait until there is something to do; False once the loop closes."""
        with self._changed:
            while not (self._tickets or self._unanswered or self._arriving or self._closing):
                self._cancelled.clear()
                self._changed.wait()
            return not self._closing

    def _take_arrivals(self) -> None:
        with self._changed:
            arriving, self._arriving = self._arriving, []
            cancelled, self._cancelled = self._cancelled, set()
        now = time.monotonic()
        for arrival in arriving:
            if isinstance(arrival, LogitsRequest):
                self._unanswered.add(arrival)
                self._engine.add(arrival)
            else:
                sequence, outbox = arrival
                self._tickets[sequence] = _Ticket(outbox=outbox, submitted_s=now)
                self._engine.add(sequence)
        cancelled.update(*(s.beams.answers for s in cancelled if isinstance(s, TokenSequence) and s.beams))
        cancelled &= self._tickets.keys() | self._unanswered
        self._engine.remove(cancelled)
        for occupant in cancelled:
            self._metrics.request_cancelled()
            self._end(occupant)

    def _gather(self) -> None:
        """Wait a little for the loops that have always come back at once, so that they share the step.

        Without it, loops that are answered together and come back microseconds apart fall into groups
        that step by turns, each step as long as one for all.
        """
        if not (self._tickets or self._unanswered):
            return
        share = GATHER_BESIDE_GENERATION if self._engine.num_generating else GATHER
        while not self._closing:
            awaited, seconds = self._engine.expected_back(within_s=share * self._decode_s)
            if not awaited:
                return
            self._wait_for_change(seconds, num_awaited=awaited)
            self._take_arrivals()

    def _wait_for_change(self, seconds: float, *, num_awaited: int = 1) -> None:
        """Wait until so many have arrived, one is cancelled, the loop closes, or the time is over."""
        with self._changed:
            self._num_awaited = num_awaited
            self._changed.wait_for(
                lambda: len(self._arriving) >= num_awaited or self._cancelled or self._closing, seconds
            )
            self._num_awaited = 1

    def _report_occupancy(self) -> None:
        self._metrics.occupancy(
            running=self._engine.num_running,
            waiting=self._engine.num_waiting,
            cache_usage=self._engine.cache_usage,
        )

    def _step(self) -> bool:
        """Run a step; False if there is work, and all slots are held by loops that are away."""
        started_s = time.monotonic()
        result = self._engine.step()
        if result is None:
            return not (self._tickets or self._unanswered)
        self._num_steps += 1
        now = time.monotonic()
        if not result.num_prompt_tokens:
            self._decode_s = now - started_s
        self._metrics.step(
            seconds=now - started_s,
            prompt_tokens=result.num_prompt_tokens,
            preempted=result.num_preempted,
        )
        self._metrics.speculated(drafted=result.num_drafted, accepted=result.num_accepted)
        self._hand_over(self._parcels(result), now=now)
        for request, logits in result.answered:
            self._answer(request, logits)
        for occupant, error in result.failed.items():
            if isinstance(occupant, LogitsRequest):
                self._answer(occupant, error)
        return True

    def _parcels(self, result: StepResult) -> list[Parcel]:
        parcels: list[Parcel] = [(s, e) for s, e in result.failed.items() if isinstance(s, TokenSequence)]
        for sequence in result.advanced:
            delta = sequence.take_delta()
            if delta is not None:
                parcels.append((sequence, delta))
        return parcels

    def _hand_over(self, parcels: Sequence[Parcel], *, now: float) -> None:
        batches: defaultdict[Outbox, list[Parcel]] = defaultdict(list)
        for sequence, content in parcels:
            ticket = self._tickets[sequence]
            batches[ticket.outbox].append((sequence, content))
            self._note(sequence, content, ticket, now=now)
        for outbox, batch in batches.items():
            try:
                outbox.deliver(batch)
            except RuntimeError:  # its event loop is closed: nobody will read these any more
                for sequence, _ in batch:
                    self.cancel(sequence)

    def _note(
        self, sequence: TokenSequence, content: Delta | GenserveError, ticket: _Ticket, *, now: float
    ) -> None:
        if isinstance(content, GenserveError):
            self._metrics.request_failed()
            self._end(sequence)
            return
        self._metrics.generated(len(content.token_ids))
        if sequence.first_token_s is None and content.token_ids:
            sequence.first_token_s = now
            self._metrics.first_token(
                seconds=now - ticket.submitted_s,
                prompt_tokens=sequence.num_prompt_tokens,
                cached_tokens=sequence.num_cached_tokens,
            )
        if content.finish_reason is not None:
            seconds, num_tokens = now - ticket.submitted_s, sequence.num_new_tokens
            logger.debug("finished: %s, %d tokens in %.3f s", content.finish_reason, num_tokens, seconds)
            self._metrics.request_finished(
                content.finish_reason,
                seconds=seconds,
                decode_seconds=now - (sequence.first_token_s or now),
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

    def _end(self, occupant: Occupant) -> None:
        if isinstance(occupant, LogitsRequest):
            self._unanswered.remove(occupant)
        elif isinstance(occupant, TokenSequence):
            del self._tickets[occupant]
        self._ended_s.append(time.monotonic())
        with self._idle:
            self._num_accepted -= 1
            if not self._num_accepted:
                self._idle.notify_all()

    def _end_all(self, error: GenserveError) -> None:
        self._take_arrivals()
        self._engine.remove([*self._tickets, *self._unanswered])
        self._report_occupancy()
        self._hand_over([(sequence, error) for sequence in self._tickets], now=time.monotonic())
        for request in tuple(self._unanswered):
            self._answer(request, error)

    def _retry_after_s(self) -> int:
        """Guess when a place becomes free, from how often one did lately."""
        ended = list(self._ended_s)
        if len(ended) < 2:
            return 1
        seconds_per_ending = (ended[-1] - ended[0]) / (len(ended) - 1)
        return min(60, math.ceil(seconds_per_ending))
