"""Event loop of a simulation: asyncio's, on a virtual thread, with a virtual clock and a seeded order."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from random import Random
from typing import Any

from tests.simulation.virtual_threads import VirtualThread, VirtualThreads


class VirtualEventLoop(asyncio.BaseEventLoop):
    """Runs the callbacks of asyncio; those of a task may overtake those of other tasks."""

    _ready: deque[Any]
    _scheduled: list[Any]
    _stopping: bool

    def __init__(self, threads: VirtualThreads, rng: Random, *, overtaking_rate: float) -> None:
        super().__init__()
        self._threads = threads
        self._draw = rng.random
        self._overtaking_rate = overtaking_rate
        self._sleeper: VirtualThread | None = None
        self.set_exception_handler(self._report)

    def time(self) -> float:
        return self._threads.now_ns / 1e9

    def _report(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._threads.report(f"the event loop caught: {context.get('message')}: {context.get('exception')!r}")

    def _write_to_self(self) -> None:
        if self._sleeper is not None:
            self._threads.wake(self._sleeper)
        self._threads.point()

    def _process_events(self, event_list: object) -> None:
        pass

    def _run_once(self) -> None:
        now, ready, scheduled = self.time(), self._ready, self._scheduled
        while scheduled and (scheduled[0]._cancelled or scheduled[0]._when <= now):
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            if not handle._cancelled:
                ready.append(handle)
        if ready:
            self._threads.point()
            handle = self._next()
            if not handle._cancelled:
                handle._run()
        elif not self._stopping:
            self._sleeper = self._threads.running
            until_ns = self._threads.on_grid(int(scheduled[0]._when * 1e9) + 1) if scheduled else None
            self._threads.wait(until_ns)
            self._sleeper = None

    def _next(self) -> Any:
        ready = self._ready
        if len(ready) > 1 and self._draw() < self._overtaking_rate:
            owner = _owner(ready[int(self._draw() * len(ready))])
            for index, handle in enumerate(ready):
                if _owner(handle) is owner:
                    del ready[index]
                    return handle
        return ready.popleft()


def _owner(handle: Any) -> object:
    """Return the task that a callback continues; None: it belongs to no task."""
    owner = getattr(handle._callback, "__self__", None)
    return owner if isinstance(owner, asyncio.Task) else None
