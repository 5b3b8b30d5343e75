"""Event loop: where the coroutines of one instance run, on a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

__all__ = ["EventLoop"]

logger = logging.getLogger(__name__)

_ENDS_WITHIN_S = 10.0


class EventLoop:
    """A running asyncio event loop. What it was given sees the context of whoever gave it."""

    def __init__(self, name: str, *, ends_within_s: float = _ENDS_WITHIN_S) -> None:
        """Start the thread.

        Args:
            name: of the instance it belongs to.
            ends_within_s: how long `close` waits for what does not let itself be cancelled.
        """
        self._ends_within_s = ends_within_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"asyncio-{name}", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine beside the others; from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what runs, and wait for its end: not for ever."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self._ends_within_s)
        if self._thread.is_alive():
            logger.error("%s: a coroutine refuses to be cancelled; it is left behind", self._thread.name)

    def _run(self) -> None:
        # Runner would close the loop on its own; here `close` says when.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
