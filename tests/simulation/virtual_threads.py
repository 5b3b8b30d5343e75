"""Virtual threads: the product's threads as coroutines that run one at a time, in a seeded order.

`virtual_product` puts stand-ins for `threading`, `time` and the queues into the product's modules, so that
the product's own code runs here. Every lock, wait and notification is a point at which another thread may
continue. The clock advances only when all threads wait, so hours of waiting take no time.
"""

from __future__ import annotations

import heapq
import importlib
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

# The modules of the product that start threads, wait, or read the clock.
MODULES = (
    "genserve.engine.delta_streams",
    "genserve.engine.disk_cache",
    "genserve.engine.engine",
    "genserve.engine.engine_thread",
    "genserve.engine.generation_request",
    "genserve.engine.input_queue",
    "genserve.inference",
    "genserve.inference_statistics",
    "genserve.repository.ensemble",
    "genserve.repository.model_lifecycle",
    "genserve.repository.model_versions",
    "genserve.repository.on_demand",
    "genserve.repository.repository",
    "genserve.repository.unloader",
    "genserve.batching.dynamic_batcher",
    "genserve.batching.model_instance",
    "genserve.batching.queue_scheduler",
    "genserve.batching.rate_limiter",
    "genserve.textmodel.text_model",
)

# The most switches and points of a simulation, which needs some hundreds of either.
_MAX_SWITCHES = 20_000
_MAX_POINTS = 200_000


class Stuck(Exception):
    """No thread can continue, and no time is awaited; or threads continue without end."""


class VirtualThread:
    """One thread; its attributes are read by the threads that wait for it."""

    def __init__(
        self, target: Callable[..., Any], name: str = "", args: tuple[Any, ...] = (), *, daemon: bool = False
    ) -> None:
        self.name = name
        self.daemon = daemon
        self._target = target
        self._args = args
        self._threads = current()
        self._joining: list[VirtualThread] = []
        self.rank = self._threads.new_rank()
        self.alive = False
        self.waits = False
        self.woken = False
        self.num_waits = 0  # so that a timer wakes the wait that it was set for
        self.greenlet = greenlet(self._run, self._threads.hub)

    def start(self) -> None:
        self.alive = True
        self._threads.started.append(self)
        self._threads.ready.append(self)
        self._threads.point()

    def is_alive(self) -> bool:
        return self.alive

    def join(self, timeout: float | None = None) -> None:
        until_ns = self._threads.time_in(timeout)
        while self.alive:
            self._joining.append(self._threads.running)
            if not self._threads.wait(until_ns):
                return

    def _run(self) -> None:
        try:
            self._target(*self._args)
        except GreenletExit:
            pass
        except BaseException:
            self._threads.report(f"thread {self.name} died:\n{traceback.format_exc()}")
        finally:
            self.alive = False
            for thread in self._joining:
                self._threads.wake(thread)


class VirtualThreads:
    """All threads of one simulation, and its clock."""

    def __init__(self, rng: Random, *, switch_rate: float) -> None:
        """Start without threads; `switch_rate` is how often another thread continues at a point."""
        self.now_ns = 1_000_000_000
        self.hub = getcurrent()
        self.running: Any = None
        self.ready: list[VirtualThread] = []
        self.started: list[VirtualThread] = []
        self.problems: list[str] = []
        self.num_switches = 0
        self._num_points = 0
        self._rng = rng
        self._draw = rng.random
        self._switch_rate = switch_rate
        # With ranks, which change seldom, a thread may stand still while others do much: Burckhardt et al.,
        # "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs" (2010).
        self._by_rank = rng.random() < 0.5
        # Only what happens at the same time can happen in another order.
        self._grid_ns = rng.choice([1, 1_000_000, 10_000_000, 50_000_000])
        self._timers: list[tuple[int, int, VirtualThread, int]] = []
        self._num_timers = 0
        self.is_ending = False

    def run(self, main: Callable[[], None]) -> None:
        """Run until `main` ends, or until a problem is reported; raises Stuck."""
        thread = VirtualThread(main, "main")
        thread.start()
        while thread.alive and not self.problems:
            if not self.ready:
                self._advance()
            ready = self.ready
            index = self._next_index() if len(ready) > 1 else 0
            self.running = ready[index]
            ready[index] = ready[-1]
            ready.pop()
            self.num_switches += 1
            if self.num_switches > _MAX_SWITCHES:
                raise Stuck(f"a thread waits in a loop: {self.running.name}")
            self.running.greenlet.switch()
        self.running = None

    def _next_index(self) -> int:
        """Return which of the threads that are ready continues: any, or the one of the highest rank."""
        if not self._by_rank:
            return int(self._draw() * len(self.ready))
        return min(range(len(self.ready)), key=lambda index: self.ready[index].rank)

    def end(self) -> None:
        """End the threads that have not ended by themselves."""
        self.is_ending = True
        for thread in self.started:
            if thread.alive:
                self.running = thread
                thread.greenlet.throw(GreenletExit)

    def new_rank(self) -> float:
        """Return the rank of a new thread."""
        return self._draw()

    def point(self) -> None:
        """Let another thread continue, sometimes."""
        self._num_points += 1
        if self._num_points > _MAX_POINTS and not self.is_ending:
            self.report(f"a thread runs without end: {self.running.name}")
            self._leave()
        if self.ready and self._draw() < self._switch_rate and self.running is not None:
            self.running.rank = self._draw()
            self.ready.append(self.running)
            self._leave()

    def wait(self, until_ns: int | None = None) -> bool:
        """Wait until `wake`; False if the time came first."""
        thread = self.running
        thread.waits, thread.woken = True, False
        if until_ns is not None:
            self._num_timers += 1
            heapq.heappush(self._timers, (until_ns, self._num_timers, thread, thread.num_waits))
        self._leave()
        return bool(thread.woken)

    def wake(self, thread: VirtualThread) -> None:
        """End the wait of a thread, if it waits."""
        if thread.waits:
            thread.waits, thread.woken = False, True
            thread.num_waits += 1
            self.ready.append(thread)

    def sleep(self, seconds: float) -> None:
        """Wait for a time, or a little longer."""
        self.wait(self.on_grid(self.now_ns + int(seconds * 1e9)))

    def on_grid(self, when_ns: int) -> int:
        """Return the next time at which clients and models do something."""
        return -(-when_ns // self._grid_ns) * self._grid_ns

    def time_in(self, seconds: float | None) -> int | None:
        """Return the time in so many seconds; None: never."""
        return None if seconds is None or seconds < 0 else self.now_ns + int(seconds * 1e9) + 1

    def report(self, problem: str) -> None:
        """Record a violation; the simulation ends with the running thread's next wait."""
        self.problems.append(problem)

    def _leave(self) -> None:
        if self.is_ending:
            raise GreenletExit
        self.hub.switch()
        if self.is_ending:
            raise GreenletExit

    def _advance(self) -> None:
        while not self.ready:
            if not self._timers:
                waiting = ", ".join(thread.name for thread in self.started if thread.alive)
                raise Stuck(f"no thread can continue: {waiting}")
            until_ns, _, thread, num_waits = heapq.heappop(self._timers)
            if thread.waits and thread.num_waits == num_waits:
                self.now_ns = max(self.now_ns, until_ns)
                thread.waits = False
                thread.num_waits += 1
                self.ready.append(thread)


_current: list[VirtualThreads] = []


def current() -> VirtualThreads:
    """Return the threads of the running simulation."""
    return _current[-1]


class Lock:
    """A `threading.Lock`; any of its waiters may get it next."""

    def __init__(self) -> None:
        self._threads = current()
        self._owner: VirtualThread | None = None
        self._waiting: deque[VirtualThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        threads = self._threads
        threads.point()
        while self._owner is not None:
            if not blocking:
                return False
            self._waiting.append(threads.running)
            if not threads.wait(threads.time_in(timeout)):
                return False
        self._owner = threads.running
        return True

    def release(self) -> None:
        if self._threads.is_ending:
            return
        assert self._owner is not None, "a lock is released that is not held"
        self._owner = None
        if self._waiting:
            self._threads.wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_raised: object) -> None:
        self.release()


class RLock(Lock):
    """A `threading.RLock`."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is not self._threads.running and not super().acquire(blocking, timeout):
            return False
        self._count += 1
        return True

    def release(self) -> None:
        if self._threads.is_ending:
            return
        assert self._owner is self._threads.running, "a lock is released by another thread"
        self._count -= 1
        if not self._count:
            super().release()

    def release_all(self) -> int:
        count, self._count = self._count, 0
        super().release()
        return count

    def acquire_again(self, count: int) -> None:
        super().acquire()
        self._count = count


class Condition:
    """A `threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._threads = current()
        self._lock = RLock() if lock is None else lock
        self._waiting: deque[VirtualThread] = deque()
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_raised: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        threads, lock = self._threads, self._lock
        thread = threads.running
        self._waiting.append(thread)
        if isinstance(lock, RLock):
            count = lock.release_all()
        else:
            lock.release()
        until_ns = None if timeout is None else threads.now_ns + max(0, int(timeout * 1e9) + 1)
        woken = threads.wait(until_ns)
        if not woken and thread in self._waiting:
            self._waiting.remove(thread)
        if isinstance(lock, RLock):
            lock.acquire_again(count)
        else:
            lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until_ns = None if timeout is None else self._threads.now_ns + int(timeout * 1e9) + 1
        while not (result := predicate()):
            remaining_ns = None if until_ns is None else until_ns - self._threads.now_ns
            if remaining_ns is not None and remaining_ns <= 0:
                return result
            self.wait(None if remaining_ns is None else remaining_ns / 1e9)
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._threads.wake(self._waiting.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Semaphore:
    """A `threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._changed = Condition()
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._changed:
            if not self._value and not blocking:
                return False
            if not self._changed.wait_for(lambda: self._value, timeout):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        with self._changed:
            self._value += n
            self._changed.notify(n)


class Event:
    """A `threading.Event`."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._is_set, timeout))


class SimpleQueue:
    """A `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._semaphore = Semaphore(0)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._semaphore.release()

    def get(self) -> Any:
        self._semaphore.acquire()
        return self._items.popleft()


class VirtualWakeup(Semaphore):
    """A `genserve.wakeup.Wakeup`."""

    def __init__(self) -> None:
        super().__init__(0)

    def notify(self) -> None:
        self.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.acquire(timeout=timeout_s)


class Future(futures.Future[Any]):
    """A future whose waiters are virtual threads."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = Condition()


class ThreadPoolExecutor:
    """An executor with at most so many threads, which end when there is nothing to do."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        self._max_workers = max_workers
        self._name = thread_name_prefix
        self._num_workers = 0
        self._waiting: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._is_shut_down = False
        self._idle = Condition()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        with self._idle:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            future = Future()
            self._waiting.append((future, lambda: function(*args)))
            is_new = self._num_workers < self._max_workers
            self._num_workers += is_new
        if is_new:
            VirtualThread(self._work, self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._idle:
                if not self._waiting:
                    self._num_workers -= 1
                    self._idle.notify_all()
                    return
                future, call = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True) -> None:
        with self._idle:
            self._is_shut_down = True
            if wait:
                self._idle.wait_for(lambda: not self._num_workers)

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.shutdown()


def _thread(
    target: Callable[..., Any],
    name: str = "",
    daemon: bool = False,
    args: tuple[Any, ...] = (),
) -> VirtualThread:
    return VirtualThread(target, name, args, daemon=daemon)


def _now_ns() -> int:
    return current().now_ns


def _now_s() -> float:
    return current().now_ns / 1e9


def _like(module: ModuleType, **replaced: Any) -> SimpleNamespace:
    """Return a stand-in for a module with some of its members replaced."""
    return SimpleNamespace(**{**vars(module), **replaced})


STAND_INS: dict[str, Any] = {
    "threading": _like(
        threading,
        Lock=Lock,
        RLock=RLock,
        Condition=Condition,
        Semaphore=Semaphore,
        Event=Event,
        Thread=_thread,
    ),
    "time": _like(
        time,
        monotonic=_now_s,
        monotonic_ns=_now_ns,
        perf_counter=_now_s,
        time=_now_s,
        time_ns=_now_ns,
        sleep=lambda seconds: current().sleep(seconds),
    ),
    "SimpleQueue": SimpleQueue,
    "Wakeup": VirtualWakeup,
    "Future": Future,
    "ThreadPoolExecutor": ThreadPoolExecutor,
}


@contextmanager
def virtual_product() -> Iterator[None]:
    """Have the product's modules use virtual threads; any number of simulations may run within."""
    replaced: list[tuple[Any, str, Any]] = [(sys, "unraisablehook", sys.unraisablehook)]
    # Coroutines that never continue after a violation complain when they are collected.
    sys.unraisablehook = lambda _: None
    try:
        for name in MODULES:
            module = importlib.import_module(name)
            for attribute, stand_in in STAND_INS.items():
                if attribute in vars(module):
                    replaced.append((module, attribute, getattr(module, attribute)))
                    setattr(module, attribute, stand_in)
        yield
    finally:
        for module, attribute, original in replaced:
            setattr(module, attribute, original)


@contextmanager
def virtual_threads(rng: Random, *, switch_rate: float) -> Iterator[VirtualThreads]:
    """Return the threads of one simulation, within `virtual_product`."""
    threads = VirtualThreads(rng, switch_rate=switch_rate)
    _current.append(threads)
    try:
        yield threads
    finally:
        logging.disable(logging.CRITICAL)  # threads that are ended say why
        threads.end()
        logging.disable(logging.NOTSET)
        _current.pop()
