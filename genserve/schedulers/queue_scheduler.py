"""Queue scheduler: a queue behind a lock, and the instances that wait for it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from genserve.bell import Bell
from genserve.errors import GenserveError
from genserve.inference import Inference
from genserve.schedulers.queue import ANY_INSTANCE, Plan, Queue, Refusal, stopping
from genserve.schedulers.timer import Timer

__all__ = ["Permit", "QueueScheduler"]

_TIMER = Timer()  # one thread for all models; it only wakes others


class Permit(Protocol):
    """What an instance must hold while it executes; see the rate limiter."""

    def acquire(self) -> None:
        """Wait for the next turn; what is held from the last is given back."""

    def release(self) -> None:
        """Give it back, if it is held."""

    def executed(self) -> None:
        """Note that the turn was used."""


class QueueScheduler:
    """The `Scheduler` of any `Queue`. An instance that finds nothing sleeps on a bell of its own.

    One lock, held for a plan at a time; requesters are always answered outside of it.
    """

    def __init__(self, queue: Queue, *, num_instances: int, permits: Sequence[Permit] = ()) -> None:
        """Make a scheduler.

        Args:
            queue: what decides.
            num_instances: how many instances will take from it, numbered from 0.
            permits: one for each instance; empty: they need none.
        """
        self._queue = queue
        self._permits = permits
        self._lock = threading.Lock()
        self._bells = [Bell() for _ in range(num_instances)]
        self._asleep: list[int] = []  # the last to come is the first to be woken: it is still warm
        self._alive = set(range(num_instances))
        self._closed = False
        self._armed_ns: int | None = None  # when the timer will look for what has expired

    @property
    def num_waiting(self) -> int:
        """Inferences accepted and not taken."""
        return len(self._queue)

    def submit(self, inference: Inference) -> None:
        """Queue an inference."""
        with self._lock:
            if self._closed:
                raise stopping(inference.request)
            instance = self._queue.add(inference, now_ns=time.monotonic_ns())
            self._arm()
            bell = None if instance is None else self._woken(instance)
        inference.when_cancelled(partial(self._cancel, inference))
        if bell is not None:
            bell.ring()  # the last: who is woken begins at once

    def take(self, instance: int) -> Sequence[Inference] | None:
        """Wait for the next batch."""
        permit = self._permits[instance] if self._permits else None
        is_held = permit is None
        while True:
            refused: list[Refusal] = []
            batch: Sequence[Inference] = ()
            bell: Bell | None = None
            with self._lock:
                now_ns = time.monotonic_ns()
                if self._armed_ns is not None and now_ns >= self._armed_ns:
                    refused = self._queue.expire(now_ns=now_ns)
                plan = self._queue.plan(instance, now_ns=now_ns)
                if plan.batch and is_held and not refused:
                    batch, bell = self._start(instance, plan, now_ns=now_ns)
                is_over = self._closed and not self._queue
                is_sleepy = not (refused or plan.batch or is_over)
                if is_sleepy:
                    self._asleep.append(instance)
            if bell is not None:
                bell.ring()
            if batch:
                return batch
            _tell(refused)
            if permit is not None and not plan.batch:
                permit.release()
                is_held = False
            if is_over:
                return None
            if is_sleepy:
                self._sleep(instance, until_ns=plan.until_ns)
            elif permit is not None and not is_held:
                permit.acquire()
                is_held = True

    def done(self, instance: int, batch: Sequence[Inference]) -> None:
        """Note that an instance has executed a batch."""
        if self._permits:
            self._permits[instance].executed()  # given back when the next is asked for
        with self._lock:
            refused = self._queue.done(instance, batch, now_ns=time.monotonic_ns())
            self._arm()
        _tell(refused)

    def close(self) -> None:
        """Accept no more, and fail what waits."""
        with self._lock:
            self._closed = True
            lost = self._queue.abandon(ANY_INSTANCE, now_ns=time.monotonic_ns())
            self._ring_all()
        for inference in lost:
            inference.fail(stopping(inference.request))

    def abandon(self, instance: int, error: GenserveError) -> None:
        """Fail what only this instance could have executed; without any left, everything that waits."""
        if self._permits:
            self._permits[instance].release()
        with self._lock:
            now_ns = time.monotonic_ns()
            self._alive.discard(instance)
            self._closed = self._closed or not self._alive
            lost = self._queue.abandon(instance if self._alive else ANY_INSTANCE, now_ns=now_ns)
            self._ring_all()
        for inference in lost:
            inference.fail(error)

    def _start(
        self, instance: int, plan: Plan, *, now_ns: int
    ) -> tuple[Sequence[Inference], Bell | None]:
        """Return the batch, and the bell of who should look at what is left."""
        batch = self._queue.start(instance, plan.batch, now_ns=now_ns)
        self._arm()
        if self._queue:
            return batch, self._woken(ANY_INSTANCE)
        if self._closed:
            self._ring_all()
        return batch, None

    def _cancel(self, inference: Inference) -> None:
        with self._lock:
            refused = self._queue.cancel(inference, now_ns=time.monotonic_ns())
            if refused:
                self._ring_all()  # another may have stood behind it
        _tell(refused)

    def _expire(self, due_ns: int) -> None:
        with self._lock:
            if self._armed_ns != due_ns:
                return  # it has been armed for an earlier time since
            self._armed_ns = None
            refused = self._queue.expire(now_ns=time.monotonic_ns())
            self._arm()
            self._ring_all()
        _tell(refused)

    def _arm(self) -> None:
        expires_ns = self._queue.expires_ns
        if expires_ns is None or (self._armed_ns is not None and self._armed_ns <= expires_ns):
            return  # the timer looks earlier, and is armed again then
        self._armed_ns = expires_ns
        _TIMER.call_at(expires_ns, partial(_expire, weakref.ref(self), expires_ns))

    def _sleep(self, instance: int, *, until_ns: int | None) -> None:
        bell = self._bells[instance]
        if bell.wait(None if until_ns is None else max(0, until_ns - time.monotonic_ns()) / 1e9):
            return
        with self._lock:
            if instance in self._asleep:
                self._asleep.remove(instance)
                return
        bell.wait()  # it is being rung just now

    def _woken(self, instance: int) -> Bell | None:
        """Return the bell of an instance that sleeps, to be rung outside of the lock; None: there is none."""
        if instance == ANY_INSTANCE:
            return self._bells[self._asleep.pop()] if self._asleep else None
        if instance not in self._asleep:
            return None
        self._asleep.remove(instance)
        return self._bells[instance]

    def _ring_all(self) -> None:
        while self._asleep:
            self._bells[self._asleep.pop()].ring()


def _tell(refused: Sequence[Refusal]) -> None:
    for refusal in refused:
        refusal.tell()


def _expire(scheduler: weakref.ref[QueueScheduler], due_ns: int) -> None:
    alive = scheduler()
    if alive is not None:
        alive._expire(due_ns)
