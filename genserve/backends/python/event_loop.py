"""Event loop: where the coroutines of one instance run, on a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

__all__ = ["EventLoop"]


class EventLoop:
    """A running asyncio event loop. What it was given sees the context of whoever gave it."""

    def __init__(self, name: str) -> None:
        """Start the thread.

        Args:
            name: of the instance it belongs to.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"asyncio-{name}", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine beside the others; from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what runs, and wait for its end."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        # Runner would close the loop on its own; here `close` says when.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
