"""Load loop: sends the requests of a load when they are due, with a limited number at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat

import anyio.lowlevel
import uvloop

from genserve.bench.answers import Answer, Failure, LoadResult
from genserve.bench.datasets import BenchPrompt
from genserve.bench.endpoint import Endpoint, RequestFailed, Target

_TICK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to send, and when."""

    prompts: Iterable[BenchPrompt]          # one of the two may have no end
    arrivals_s: Iterable[float] = field(default_factory=lambda: repeat(0.0))    # when each is due; 0: at once
    max_concurrency: int | None = None      # further requests wait in the client; None: no limit
    duration_s: float | None = None         # afterwards, unfinished answers are cut; None: until the last one
    timeout_s: float = 600.0                # of a request
    retry_rejected: bool = False            # repeat a request after a 429 or 503, when the server says


def run_load(
    load: Load, target: Target, result: LoadResult, *, on_tick: Callable[[], None] = lambda: None
) -> None:
    """Send all requests and wait for their answers, which are added to `result` as they arrive.

    A request that fails is an answer with a `failure`. Ctrl-C raises KeyboardInterrupt; `result` then has
    what was measured so far.

    Args:
        load: the requests.
        target: where they go.
        result: receives the answers.
        on_tick: called twice a second; it delays the answers, so it must be quick.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(load, target, result, on_tick))


async def _run(load: Load, target: Target, result: LoadResult, on_tick: Callable[[], None]) -> None:
    async with Endpoint(target) as endpoint:
        await anyio.lowlevel.checkpoint()   # imports a backend, which would delay the first request
        ticks = asyncio.create_task(_tick(on_tick))
        result.started_s, cpu_started_s = time.perf_counter(), time.process_time()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(load.duration_s):
                    await _send_all(load, endpoint, result)
        finally:
            result.elapsed_s = time.perf_counter() - result.started_s
            result.cpu_s = time.process_time() - cpu_started_s
            ticks.cancel()


async def _tick(on_tick: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        on_tick()


async def _send_all(load: Load, endpoint: Endpoint, result: LoadResult) -> None:
    places = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
    async with asyncio.TaskGroup() as tasks:
        for due_s, prompt in zip(load.arrivals_s, load.prompts, strict=False):
            # In a loop: uvloop rounds to milliseconds, and may wake too early.
            while (early_s := result.started_s + due_s - time.perf_counter()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(early_s)
            if places:
                await places.acquire()
            task = tasks.create_task(_send(prompt, load, endpoint, result))
            if places:
                task.add_done_callback(lambda _task: places.release())


async def _send(prompt: BenchPrompt, load: Load, endpoint: Endpoint, result: LoadResult) -> None:
    answer = Answer(sent_s=time.perf_counter())
    result.answers.append(answer)
    try:
        async with asyncio.timeout(load.timeout_s):
            while not await _asked(prompt, load, endpoint, answer):
                pass
    except RequestFailed as error:
        answer.failure = error.failure
    except TimeoutError:
        answer.failure = Failure(kind="timeout", message=f"no complete answer within {load.timeout_s:g} s")
    finally:
        if not answer.is_complete:
            answer.end_s = time.perf_counter()


async def _asked(prompt: BenchPrompt, load: Load, endpoint: Endpoint, answer: Answer) -> bool:
    """Send a request; returns False, after the server's time, if it is to be repeated."""
    try:
        await endpoint.ask(prompt, answer)
    except RequestFailed as error:
        if not load.retry_rejected or error.retry_s is None:
            raise
        answer.rejections_s.append(time.perf_counter() - answer.sent_s)
        await asyncio.sleep(error.retry_s)
        return False
    return True
