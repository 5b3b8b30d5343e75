"""Daemon thread: a call that may never return, awaited beside the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["start_daemon"]

T = TypeVar("T")


def start_daemon(function: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Call a function on a thread of its own, and return what it will have returned or raised.

    Unlike a thread of a pool, it does not keep the process from ending.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(future)
