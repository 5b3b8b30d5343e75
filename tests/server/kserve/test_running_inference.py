from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest

from genserve.inference import InferenceResponse
from genserve.server.kserve.running_inference import ResponseDispatcher, Responses
from genserve.wakeup import MAX_ITEMS_PER_TURN


async def test_responses_of_many_threads_keep_their_order() -> None:
    outbox = ResponseDispatcher(asyncio.get_running_loop())
    streams = [Responses(outbox) for _ in range(8)]

    def answer(number: int) -> None:
        for index in range(200):
            streams[number].on_response(InferenceResponse(parameters={"index": index}), False)
        streams[number].on_response(None, True)

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for stream in streams:
        assert [response.parameters["index"] async for response in stream] == list(range(200))
    for thread in threads:
        thread.join()


async def test_the_event_loop_serves_others_between_the_responses_of_a_large_batch() -> None:
    dispatcher = ResponseDispatcher(asyncio.get_running_loop())
    streams = [Responses(dispatcher) for _ in range(500)]
    turns, ends = 0, []

    async def probe() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def read(number: int) -> None:
        assert await streams[number].next() == (None, True)
        ends.append(turns)

    probing, *reading = map(asyncio.create_task, (probe(), *map(read, range(500))))
    await asyncio.sleep(0)      # all of them wait
    for stream in streams:
        stream.on_response(None, True)
    await asyncio.gather(*reading)
    probing.cancel()
    assert max(Counter(ends).values()) <= MAX_ITEMS_PER_TURN


async def test_abandoning_responses_wakes_their_reader() -> None:
    responses = Responses(ResponseDispatcher(asyncio.get_running_loop()))
    reading = asyncio.ensure_future(responses.next())
    await asyncio.sleep(0)
    responses.abandon(ConnectionError())
    with pytest.raises(ConnectionError):
        await reading
    with pytest.raises(ConnectionError):
        await responses.next()


def test_a_response_after_the_loop_has_closed_is_dropped() -> None:
    loop = asyncio.new_event_loop()
    responses = Responses(ResponseDispatcher(loop))
    loop.close()
    responses.on_response(None, True)
