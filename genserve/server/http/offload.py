"""Offload: runs work on another thread where it would block the event loop.

`start_daemon` is for work that may never return: its thread does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.concurrency import run_in_threadpool

from genserve.completion import Delta
from genserve.tensor import DataType, Tensor

T = TypeVar("T")

# Costs are in bytes of JSON; this many are read or written within some milliseconds.
_LARGE = 256 * 1024
# A byte of data that becomes single Python objects, as short strings do, costs as much as this much JSON.
COST_PER_OBJECT_BYTE = 8
_COST_PER_STRING = 32
_COPIED_BYTES_PER_COST = 16
# A token of an answer; and one of the likeliest tokens in its place, whose text is decoded.
_COST_PER_TOKEN = 32
_COST_PER_CANDIDATE = 512


async def offload_if_large(cost: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function, on a thread of the pool if it costs much."""
    if cost > _LARGE:
        return await run_in_threadpool(function, *args, **kwargs)
    return function(*args, **kwargs)


async def run_for_long(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that may take minutes, on none of the pool's threads: large requests need these."""
    return await to_thread.run_sync(partial(function, *args, **kwargs), limiter=CapacityLimiter(1))


def write_cost(tensor: Tensor, *, copied: bool) -> int:
    """Return the cost of writing an output; it is less where numbers are `copied`, not printed."""
    count = math.prod(tensor.shape)
    if tensor.data_type is not DataType.BYTES:
        return count * tensor.data_type.itemsize // (_COPIED_BYTES_PER_COST if copied else 1)
    if count * _COST_PER_STRING > _LARGE:
        return count * _COST_PER_STRING
    return sum(len(text) for text in tensor.array.flat if isinstance(text, (bytes, str)))


def answer_cost(deltas: Sequence[Delta]) -> int:
    """Return the cost of writing deltas in any dialect."""
    num_tokens = num_candidates = 0
    for delta in deltas:
        num_tokens += len(delta.token_ids)
        num_candidates += sum(map(len, delta.top_logprobs)) if delta.top_logprobs else 0
        if delta.prompt_logprobs:
            num_candidates += sum(1 + len(score.top) for score in delta.prompt_logprobs)
    return _COST_PER_TOKEN * num_tokens + _COST_PER_CANDIDATE * num_candidates


def start_daemon(function: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Call a function that may never return on its own thread, and return the future of its result.

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
