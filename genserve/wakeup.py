"""Wakeup: lets any thread wake one waiting thread, or pass items to an event loop."""

from __future__ import annotations

import asyncio
import os
import select
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

# How many items one turn of the event loop handles. Writing a thousand events takes 0.2 s, and the loop has
# other work to do in between.
MAX_ITEMS_PER_TURN = 64


class Wakeup:
    """Each `notify` ends one `wait`, which may come before or after it. Any thread notifies, and one waits.

    The implementation is a pipe rather than a lock: a write releases the interpreter's lock, so the woken
    thread runs immediately. Releasing a lock wakes a thread that finds the interpreter busy and sleeps again.
    On two cores, a call and its answer take a quarter of the time over two pipes that they take over two
    locks.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        self._poll = poll.poll

    def notify(self) -> None:
        """End one wait."""
        os.write(self._write_end, b"!")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a notification; False: the time is up."""
        if timeout_s is not None and not self._poll(timeout_s * 1000):
            return False
        os.read(self._read_end, 1)
        return True

    def __del__(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)


class EventLoopQueue(Generic[T]):
    """Passes items from any thread to a function on an event loop, with one wake-up for all waiting items.

    If there are many items, the function is called in several turns of the loop.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        self._event_loop = event_loop
        self._take = take
        self._arrived: deque[T] = deque()
        self._woken = False

    def put(self, items: Iterable[T]) -> None:
        """Queue items; raises RuntimeError once the event loop is closed."""
        self._arrived.extend(items)
        if self._woken and not self._event_loop.is_closed():
            return
        self._woken = True
        try:
            self._event_loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:
            self._arrived.clear()
            raise

    def _hand_over(self) -> None:
        # Do this first, so that items that arrive from here on wake the loop again.
        self._woken = False
        for _ in range(min(len(self._arrived), MAX_ITEMS_PER_TURN)):
            self._take(self._arrived.popleft())
        if self._arrived and not self._woken:
            self._woken = True
            self._event_loop.call_soon(self._hand_over)
