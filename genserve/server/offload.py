"""Offload: keeps slow work off the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from genserve.tensor import DataType, Tensor

__all__ = ["ONE_BY_ONE", "beside", "start_daemon", "work_of"]


T = TypeVar("T")

# Work is told in bytes of JSON; so many are read or written within some milliseconds.
_MUCH = 256 * 1024
# A byte of what becomes objects of Python one by one, as short strings do, is so many of JSON.
ONE_BY_ONE = 8
_WORK_OF_STRING = 32
_COPIED_PER_WORK = 16


async def beside(work: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function, on another thread where it is much work."""
    if work > _MUCH:
        return await run_in_threadpool(function, *args, **kwargs)
    return function(*args, **kwargs)


def work_of(tensor: Tensor, *, copied: bool) -> int:
    """Return the work of writing an output; it is less where numbers are `copied`, not made text."""
    count = math.prod(tensor.shape)
    if tensor.data_type is not DataType.BYTES:
        return count * tensor.data_type.itemsize // (_COPIED_PER_WORK if copied else 1)
    if count * _WORK_OF_STRING > _MUCH:
        return count * _WORK_OF_STRING
    return sum(len(text) for text in tensor.array.flat if isinstance(text, (bytes, str)))


R = TypeVar("R")


def start_daemon(function: Callable[[], R], *, name: str) -> asyncio.Future[R]:
    """Call a function on a thread of its own, and return what it will have returned or raised.

    Unlike a thread of a pool, it does not keep the process from ending.
    """
    future: concurrent.futures.Future[R] = concurrent.futures.Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(future)
