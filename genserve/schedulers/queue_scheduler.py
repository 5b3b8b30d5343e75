"""Queue scheduler: a queue behind a lock, from which the instances of a model take their batches."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from genserve.config.model_config import ModelConfig
from genserve.errors import GenserveError
from genserve.inference import Inference
from genserve.schedulers.dynamic_batcher import DynamicQueue, alike
from genserve.schedulers.request_queue import ANY_INSTANCE, DirectQueue, Plan, Queue, Refusal, stopping
from genserve.schedulers.sequence_batcher import SequenceQueue
from genserve.wakeup import Wakeup

__all__ = ["Permit", "QueueScheduler", "Scheduler", "Timer", "make_scheduler"]


logger = logging.getLogger(__name__)


class Timer:
    """Calls back at given times, from a thread of its own that starts with the first call.

    What a callback refers to is kept until then; one that is no longer needed should do nothing.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> None:
        """Call back once it is `when_ns` by `time.monotonic_ns()`. The callback must not block."""
        with self._changed:
            heapq.heappush(self._calls, (when_ns, next(self._order), callback))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="timer", daemon=True)
                self._thread.start()
            elif self._calls[0][2] is callback:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            callback = self._next()
            try:
                callback()
            except Exception:
                logger.exception("a timed call failed")
            del callback  # not kept alive until the next one is due

    def _next(self) -> Callable[[], None]:
        with self._changed:
            while True:
                if not self._calls:
                    self._changed.wait()
                    continue
                remaining_ns = self._calls[0][0] - time.monotonic_ns()
                if remaining_ns <= 0:
                    return heapq.heappop(self._calls)[2]
                self._changed.wait(remaining_ns / 1e9)


class Scheduler(Protocol):
    """Queues inferences; instances pull. There is no thread in between: one hand-over per batch.

    `submit` and `close` are called from any thread, `take` and `done` by the thread of each instance.
    A batch can grow until an instance is free, because it is formed when an instance asks for it.
    """

    @property
    def num_waiting(self) -> int:
        """Inferences accepted and not taken."""

    def submit(self, inference: Inference) -> None:
        """Queue an inference, whose request fits the model's config.

        Raises:
            InferenceError: the queue is full, the request breaks the rules of its sequence, or the model is
                being unloaded.
        """

    def take(self, instance: int) -> Sequence[Inference] | None:
        """Wait for the next batch for an instance, by number; None: closed.

        What is cancelled or timed out while it waits is ended, and never in a batch. What is cancelled once
        it is in one is executed: the model may ask whether it was.
        """

    def done(self, instance: int, batch: Sequence[Inference]) -> None:
        """Note that `execute` has returned: an iterative request is queued again, a sequence goes on."""

    def close(self) -> None:
        """Accept no more, and fail what waits; from now on there is nothing to `take`."""

    def abandon(self, instance: int, error: GenserveError) -> None:
        """Note that an instance has died: what only it could have executed fails.

        After the last one everything fails that waits, and nothing more is accepted.
        """


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
    """The `Scheduler` of any `Queue`. An instance without work sleeps on its own wakeup.

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
        self._wakeups = [Wakeup() for _ in range(num_instances)]
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
            wakeup = None if instance is None else self._woken(instance)
        inference.when_cancelled(partial(self._cancel, inference))
        if wakeup is not None:
            wakeup.notify()  # last, since the woken thread runs immediately

    def take(self, instance: int) -> Sequence[Inference] | None:
        """Wait for the next batch."""
        permit = self._permits[instance] if self._permits else None
        is_held = permit is None
        while True:
            refused: list[Refusal] = []
            batch: Sequence[Inference] = ()
            wakeup: Wakeup | None = None
            with self._lock:
                now_ns = time.monotonic_ns()
                if self._armed_ns is not None and now_ns >= self._armed_ns:
                    refused = self._queue.expire(now_ns=now_ns)
                plan = self._queue.plan(instance, now_ns=now_ns)
                if plan.batch and is_held and not refused:
                    batch, wakeup = self._start(instance, plan, now_ns=now_ns)
                is_over = self._closed and not self._queue
                is_sleepy = not (refused or plan.batch or is_over)
                if is_sleepy:
                    self._asleep.append(instance)
            if wakeup is not None:
                wakeup.notify()
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
    ) -> tuple[Sequence[Inference], Wakeup | None]:
        """Return the batch, and the wakeup of the instance that should plan the rest."""
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
        wakeup = self._wakeups[instance]
        if wakeup.wait(None if until_ns is None else max(0, until_ns - time.monotonic_ns()) / 1e9):
            return
        with self._lock:
            if instance in self._asleep:
                self._asleep.remove(instance)
                return
        wakeup.wait()  # it is being notified just now

    def _woken(self, instance: int) -> Wakeup | None:
        """Return the wakeup of a sleeping instance, to be notified outside of the lock; None: none sleeps."""
        if instance == ANY_INSTANCE:
            return self._wakeups[self._asleep.pop()] if self._asleep else None
        if instance not in self._asleep:
            return None
        self._asleep.remove(instance)
        return self._wakeups[instance]

    def _ring_all(self) -> None:
        while self._asleep:
            self._wakeups[self._asleep.pop()].notify()


def _tell(refused: Sequence[Refusal]) -> None:
    for refusal in refused:
        refusal.tell()


def _expire(scheduler: weakref.ref[QueueScheduler], due_ns: int) -> None:
    alive = scheduler()
    if alive is not None:
        alive._expire(due_ns)


def make_scheduler(
    config: ModelConfig, *, num_instances: int, path: Path, permits: Sequence[Permit] = ()
) -> Scheduler:
    """Make the scheduler of one version of a model.

    Args:
        config: of the model, normalised.
        num_instances: how many instances will take from it, numbered from 0.
        path: the folder of the model, for the files of initial states.
        permits: what each instance must hold while it executes, from the rate limiter; empty: nothing.

    Raises:
        RepositoryError: a file of an initial state cannot be read, or is too short.
    """
    queue = _queue(config, num_instances=num_instances, path=path)
    return QueueScheduler(queue, num_instances=num_instances, permits=permits)


def _queue(config: ModelConfig, *, num_instances: int, path: Path) -> Queue:
    if config.sequence_batching is not None:
        return SequenceQueue(config, num_instances=num_instances, path=path)
    if config.dynamic_batching is not None:
        return DynamicQueue(
            config.dynamic_batching, max_batch_size=config.max_batch_size, alike=alike(config)
        )
    return DirectQueue()
