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
from genserve.generation.request_inbox import RequestOutput, Reservation
from genserve.generation.text_engine import TextEngine
from genserve.wakeup import EventLoopQueue


class DeltaStream:
    """An iterator over the deltas of one request, for one ordinary thread.

    Close it, or use it as a context manager: a request whose stream is abandoned keeps its blocks.
    """

    def __init__(self, engine: TextEngine, sequence: TokenSequence) -> None:
        """Submit the sequence; raises the errors of `RequestInbox.submit`."""
        self._engine = engine
        self._sequence = sequence
        # Bounded by the longest answer: at most one delta per token.
        self._arrived: SimpleQueue[Delta | GenserveError] = SimpleQueue()
        self._ended = False
        engine.submit(sequence, sink=self)

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Take over outputs; see `OutputSink`."""
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
        """Cancel the request if it has not ended; a second call does nothing."""
        if not self._ended:
            self._ended = True
            self._engine.cancel(self._sequence)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class EventLoopSink:
    """Hands outputs to the streams of one event loop, which it wakes once per step; an `OutputSink`."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._streams: dict[TokenSequence, AsyncDeltaStream] = {}
        self._queue = EventLoopQueue(event_loop, self._dispatch)

    def open(
        self, engine: TextEngine, *sequences: TokenSequence, reservation: Reservation | None = None
    ) -> AsyncDeltaStream:
        """Submit the choices of a request and return their stream; see `RequestInbox.submit`."""
        engine.submit(*sequences, sink=self, reservation=reservation)
        stream = AsyncDeltaStream(engine, sequences, sink=self)
        self._streams.update(dict.fromkeys(sequences, stream))
        return stream

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Take over outputs; see `OutputSink`. RuntimeError once the event loop is closed."""
        self._queue.put(outputs)

    def forget(self, sequence: TokenSequence) -> None:
        """Drop later outputs of a sequence; for the stream."""
        self._streams.pop(sequence, None)

    def _dispatch(self, output: RequestOutput) -> None:
        stream = self._streams.get(output[0])
        if stream is not None:
            stream.put(output)


class AsyncDeltaStream:
    """An asynchronous iterator over the deltas of one request; made by `EventLoopSink.open`.

    Each iteration returns all deltas that have arrived, at least one, in the order in which they were made.
    Each has the number of its choice. If a choice fails, the error is raised after the deltas before it, and
    the other choices are cancelled.

    Close it, or use it as a context manager: a request whose stream is abandoned keeps its blocks.
    """

    def __init__(
        self, engine: TextEngine, sequences: Sequence[TokenSequence], *, sink: EventLoopSink
    ) -> None:
        self._engine = engine
        self._sink = sink
        # The choices that have not ended, and their numbers.
        self._choices = {sequence: choice for choice, sequence in enumerate(sequences)}
        # Bounded by the longest answers: at most one delta per token.
        self._arrived: deque[RequestOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Add an output; for the sink, on the event loop."""
        self._arrived.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def first(self) -> None:
        """Wait for the first delta without consuming it.

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
        self._sink.forget(sequence)

    def close(self) -> None:
        """Cancel the choices that have not ended; a second call does nothing."""
        for sequence in self._choices:
            self._sink.forget(sequence)
            self._engine.cancel(sequence)
        self._choices.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        self.close()
