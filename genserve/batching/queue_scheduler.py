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

from genserve.batching.dynamic_batcher import DynamicQueue, batch_key
from genserve.batching.rate_limiter import ResourcePermit
from genserve.batching.request_queue import (
    ANY_INSTANCE,
    BatchPlan,
    DirectQueue,
    Queue,
    Rejection,
    stopping_error,
)
from genserve.batching.sequence_batcher import SequenceQueue
from genserve.config.model_config import ModelConfig
from genserve.errors import GenserveError
from genserve.inference import Inference
from genserve.wakeup import Wakeup

logger = logging.getLogger(__name__)


def make_scheduler(
    config: ModelConfig, *, num_instances: int, path: Path, permits: Sequence[ResourcePermit] = ()
) -> QueueScheduler:
    """Make the scheduler of one version of a model.

    Args:
        config: the model's config, normalised.
        num_instances: instances that will take batches, numbered from 0.
        path: the folder of the model, for the files of initial states.
        permits: permits of the rate limiter, one for each instance; empty: no limit.

    Raises:
        RepositoryError: the file of an initial state cannot be read, or is too short.
    """
    queue = _make_queue(config, num_instances=num_instances, path=path)
    return QueueScheduler(queue, num_instances=num_instances, permits=permits)


def _make_queue(config: ModelConfig, *, num_instances: int, path: Path) -> Queue:
    if config.sequence_batching is not None:
        return SequenceQueue(config, num_instances=num_instances, path=path)
    if config.dynamic_batching is not None:
        return DynamicQueue(
            config.dynamic_batching, max_batch_size=config.max_batch_size, batch_key=batch_key(config)
        )
    return DirectQueue()


class Timer:
    """Calls back at given times, from a dedicated thread that starts with the first call.

    A callback cannot be cancelled, and keeps its arguments alive until then.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> None:
        """Call back at `when_ns` of `time.monotonic_ns()`. The callback must not block."""
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
                logger.exception("a timer callback failed")
            del callback  # do not keep it alive until the next one is due

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


_TIMER = Timer()  # one thread for all models; it only wakes other threads


class QueueScheduler:
    """Queues the inferences of one version of a model; its instances pull batches.

    There is no scheduler thread: a batch can grow until an instance asks for it. An idle instance sleeps on
    its own wakeup. One lock is held while a batch is planned; requesters are always answered outside of it.
    `submit` and `close` are called from any thread, `take` and `done` by the thread of each instance.
    """

    def __init__(self, queue: Queue, *, num_instances: int, permits: Sequence[ResourcePermit] = ()) -> None:
        """Make a scheduler.

        Args:
            queue: decides which requests run when.
            num_instances: instances that will take batches, numbered from 0.
            permits: permits of the rate limiter, one for each instance; empty: no limit.
        """
        self._queue = queue
        self._permits = permits
        self._lock = threading.Lock()
        self._wakeups = [Wakeup() for _ in range(num_instances)]
        self._asleep: list[int] = []  # a stack: the last to fall asleep has the warmest caches
        self._alive = set(range(num_instances))
        self._closed = False
        self._armed_ns: int | None = None  # when the timer calls `_expire`

    @property
    def num_waiting(self) -> int:
        """Inferences accepted and not taken."""
        return len(self._queue)

    def submit(self, inference: Inference) -> None:
        """Queue an inference that has been validated against the model's config.

        Raises:
            InferenceError: the queue is full, the request violates the rules of its sequence, or the model is
                being unloaded.
        """
        with self._lock:
            if self._closed:
                raise stopping_error(inference.request)
            instance = self._queue.add(inference, now_ns=time.monotonic_ns())
            if self._queue.expires_ns is not None:
                self._arm()
            wakeup = None if instance is None else self._pop_sleeper(instance)
        inference.when_cancelled(partial(self._cancel, inference))
        if wakeup is not None:
            wakeup.notify()  # last, since the other thread runs immediately

    def take(self, instance: int) -> Sequence[Inference] | None:
        """Wait for the next batch of an instance; None: the scheduler is closed.

        Inferences that are cancelled or time out while they wait are ended here. Once they are in a batch
        they are executed even if cancelled; the model may ask whether they are.
        """
        permit = self._permits[instance] if self._permits else None
        has_permit = permit is None
        while True:
            rejected: list[Rejection] = []
            batch: Sequence[Inference] = ()
            wakeup: Wakeup | None = None
            with self._lock:
                now_ns = time.monotonic_ns()
                if self._armed_ns is not None and now_ns >= self._armed_ns:
                    rejected = self._queue.expire(now_ns=now_ns)
                plan = self._queue.plan(instance, now_ns=now_ns)
                if plan.batch and has_permit and not rejected:
                    batch, wakeup = self._start(instance, plan, now_ns=now_ns)
                is_finished = self._closed and not self._queue
                is_idle = not (rejected or plan.batch or is_finished)
                if is_idle:
                    self._asleep.append(instance)
            if wakeup is not None:
                wakeup.notify()
            if batch:
                return batch
            for rejection in rejected:
                rejection.send()
            if permit is not None and not plan.batch:
                permit.release()
                has_permit = False
            if is_finished:
                return None
            if is_idle:
                self._sleep(instance, until_ns=plan.until_ns)
            elif permit is not None and not has_permit:
                permit.acquire()
                has_permit = True

    def done(self, instance: int, batch: Sequence[Inference]) -> None:
        """Record that `execute` has returned: iterative requests are queued again, sequences continue."""
        if self._permits:
            self._permits[instance].executed()  # released when the next one is requested
        with self._lock:
            rejected = self._queue.done(instance, batch, now_ns=time.monotonic_ns())
            if self._queue.expires_ns is not None:
                self._arm()
        for rejection in rejected:
            rejection.send()

    def close(self) -> None:
        """Reject new inferences and fail the waiting ones; afterwards `take` returns None."""
        with self._lock:
            self._closed = True
            lost = self._queue.abandon(ANY_INSTANCE, now_ns=time.monotonic_ns())
            self._notify_all()
        for inference in lost:
            inference.fail(stopping_error(inference.request))

    def abandon(self, instance: int, error: GenserveError) -> None:
        """Record that an instance has died: fail the inferences that only it could execute.

        When the last instance has died, all waiting inferences fail and new ones are rejected.
        """
        if self._permits:
            self._permits[instance].release()
        with self._lock:
            now_ns = time.monotonic_ns()
            self._alive.discard(instance)
            self._closed = self._closed or not self._alive
            lost = self._queue.abandon(instance if self._alive else ANY_INSTANCE, now_ns=now_ns)
            self._notify_all()
        for inference in lost:
            inference.fail(error)

    def _start(
        self, instance: int, plan: BatchPlan, *, now_ns: int
    ) -> tuple[Sequence[Inference], Wakeup | None]:
        """Return the batch, and the wakeup of an instance that should plan the rest of the queue."""
        batch = self._queue.start(instance, plan.batch, now_ns=now_ns)
        if self._queue.expires_ns is not None:
            self._arm()
        if self._queue:
            return batch, self._pop_sleeper(ANY_INSTANCE)
        if self._closed:
            self._notify_all()
        return batch, None

    def _cancel(self, inference: Inference) -> None:
        with self._lock:
            rejected = self._queue.cancel(inference, now_ns=time.monotonic_ns())
            if rejected:
                self._notify_all()  # a batch may have waited for it
        for rejection in rejected:
            rejection.send()

    def _expire(self, due_ns: int) -> None:
        with self._lock:
            if self._armed_ns != due_ns:
                return  # the timer has been armed for an earlier time since
            self._armed_ns = None
            rejected = self._queue.expire(now_ns=time.monotonic_ns())
            self._arm()
            self._notify_all()
        for rejection in rejected:
            rejection.send()

    def _arm(self) -> None:
        expires_ns = self._queue.expires_ns
        if expires_ns is None or (self._armed_ns is not None and self._armed_ns <= expires_ns):
            return  # the timer fires earlier, and is armed again then
        self._armed_ns = expires_ns
        _TIMER.call_at(expires_ns, partial(_call_if_alive, weakref.WeakMethod(self._expire), expires_ns))

    def _sleep(self, instance: int, *, until_ns: int | None) -> None:
        wakeup = self._wakeups[instance]
        if wakeup.wait(None if until_ns is None else max(0, until_ns - time.monotonic_ns()) / 1e9):
            return
        with self._lock:
            if instance in self._asleep:
                self._asleep.remove(instance)
                return
        wakeup.wait()  # another thread is about to notify

    def _pop_sleeper(self, instance: int) -> Wakeup | None:
        """Return the wakeup of a sleeping instance, to be notified outside of the lock; None: none sleeps."""
        if instance == ANY_INSTANCE:
            return self._wakeups[self._asleep.pop()] if self._asleep else None
        if instance not in self._asleep:
            return None
        self._asleep.remove(instance)
        return self._wakeups[instance]

    def _notify_all(self) -> None:
        while self._asleep:
            self._wakeups[self._asleep.pop()].notify()


def _call_if_alive(expire: weakref.WeakMethod[Callable[[int], None]], due_ns: int) -> None:
    """Call the method, unless its scheduler is gone: the timer does not keep it alive."""
    alive = expire()
    if alive is not None:
        alive(due_ns)
