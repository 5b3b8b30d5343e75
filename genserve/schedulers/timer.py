"""Timer: one thread that calls back when a time has come."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Timer"]

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
