"""Delta streams: deltas of a request, handed from the engine's thread to the thread or loop that reads them.

This is the only place where the engine's thread meets other threads' queues and event loops.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Self

from genserve.completion import Delta
from genserve.errors import GenserveError
from genserve.generation.engine_request import TokenSequence
from genserve.generation.engine_thread import EngineThread, RequestOutput, Reservation

__all__ = ["AsyncStream", "DeltaStream", "EventLoopOutbox"]


class DeltaStream:
    """An iterator over the deltas of one request, for one ordinary thread.

    Close it, or use it as a context manager: a stream left early goes on occupying its blocks.
    """

    def __init__(self, engine: EngineThread, sequence: TokenSequence) -> None:
        """Submit the sequence; raises what `EngineThread.submit` raises."""
        self._engine = engine
        self._sequence = sequence
        # Bounded by the longest answer: one delta per token at the most.
        self._arrived: SimpleQueue[Delta | GenserveError] = SimpleQueue()
        self._ended = False
        engine.submit(sequence, outbox=self)

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Take over outputs; the `Outbox` protocol."""
        for _, content in outputs:
            self._arrived.put(content)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        content = self._arrived.get()
        if isinstance(content, GenserveError):
            self._ended = True
            raise content
        self._ended = content.finish_reason is not None
        return content

    def close(self) -> None:
        """Stop the request if it still runs; a second call does nothing."""
        if not self._ended:
            self._ended = True
            self._engine.cancel(self._sequence)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class EventLoopOutbox:
    """Hands outputs to the streams of one event loop: one wake-up of that loop per step."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._streams: dict[TokenSequence, AsyncStream] = {}

    def open(
        self, engine: EngineThread, *sequences: TokenSequence, reservation: Reservation | None = None
    ) -> AsyncStream:
        """Submit the choices of a request and return their stream; see `EngineThread.submit`."""
        engine.submit(*sequences, outbox=self, reservation=reservation)
        stream = AsyncStream(engine, sequences, outbox=self)
        self._streams.update(dict.fromkeys(sequences, stream))
        return stream

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Take over outputs; the `Outbox` protocol. RuntimeError once the event loop is closed."""
        self._event_loop.call_soon_threadsafe(self._dispatch, outputs)

    def forget(self, sequence: TokenSequence) -> None:
        """Drop what still arrives for a sequence; for the stream."""
        self._streams.pop(sequence, None)

    def _dispatch(self, outputs: Sequence[RequestOutput]) -> None:
        for sequence, content in outputs:
            stream = self._streams.get(sequence)
            if stream is not None:
                stream.put((sequence, content))


class AsyncStream:
    """An asynchronous iterator over the deltas of one request; made by `EventLoopOutbox.open`.

    Each turn gives all that have arrived, at least one: the deltas of its choices in the order in which
    they were made, and each says whose it is. If one choice fails, the error is raised behind what came
    before it, and none goes on.

    Close it, or use it as a context manager: a stream left early goes on occupying its blocks.
    """

    def __init__(
        self, engine: EngineThread, sequences: Sequence[TokenSequence], *, outbox: EventLoopOutbox
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        # Those that have not ended, and their numbers.
        self._choices = {sequence: choice for choice, sequence in enumerate(sequences)}
        # Bounded by the longest answers: one delta per token at the most.
        self._arrived: deque[RequestOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Add what arrived; for the outbox, on the event loop."""
        self._arrived.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def first(self) -> None:
        """Wait for the first delta, which is still there to be read.

        Raises:
            GenserveError: the request ended before it had one.
        """
        await self._arrival()
        sequence, content = self._arrived[0]
        if isinstance(content, GenserveError):
            self._end(sequence)
            self.close()
            raise content

    async def _arrival(self) -> None:
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        if not self._choices:
            raise StopAsyncIteration
        await self._arrival()
        deltas: list[Delta] = []
        while self._arrived:
            sequence, content = self._arrived[0]
            if isinstance(content, GenserveError):
                if deltas:
                    break
                self._end(sequence)
                self.close()
                raise content
            self._arrived.popleft()
            choice = self._choices[sequence]
            if content.finish_reason is not None:
                self._end(sequence)
            deltas.append(replace(content, choice=choice) if choice else content)
        return deltas

    def _end(self, sequence: TokenSequence) -> None:
        del self._choices[sequence]
        self._outbox.forget(sequence)

    def close(self) -> None:
        """Stop what still runs of the request; a second call does nothing."""
        for sequence in self._choices:
            self._outbox.forget(sequence)
            self._engine.cancel(sequence)
        self._choices.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        self.close()
