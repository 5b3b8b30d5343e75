"""Delta streams: deltas of a request, passed from the engine's thread to the thread or loop that reads them.

This is the only place where the engine's thread meets other threads' queues and event loops.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Self

from genserve.completion import Delta, require_tokens
from genserve.engine.generation_request import AnswerRecord, GenerationOutput, GenerationRequest
from genserve.engine.input_queue import Reservation
from genserve.engine.text_engine import TextEngine
from genserve.errors import Closed, GenserveError
from genserve.wakeup import EventLoopQueue


class DeltaStream:
    """An iterator over the deltas of one request, for one ordinary thread.

    Each delta has the number of its choice. If a choice fails, the error is raised, and the other choices are
    cancelled. Close the stream, or use it as a context manager: a request whose stream is abandoned keeps its
    blocks.
    """

    def __init__(self, engine: TextEngine, request: GenerationRequest) -> None:
        """Submit the request; raises the errors of `TextEngine.submit`."""
        self._engine = engine
        self._request = request
        # Bounded by the longest answers: at most one delta per token.
        self._arrived: SimpleQueue[GenerationOutput] = SimpleQueue()
        self._num_open = request.num_choices
        engine.submit(request, sink=self)

    def deliver(self, outputs: Sequence[GenerationOutput]) -> None:
        """Receive outputs; see `OutputSink`."""
        for output in outputs:
            self._arrived.put(output)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if not self._num_open:
            raise StopIteration
        output = self._arrived.get()
        content = output.content
        if isinstance(content, GenserveError):
            self.close()
            raise content
        self._num_open -= content.finish_reason is not None
        return replace(content, choice=output.choice) if output.choice else content

    def close(self) -> None:
        """Cancel the choices that have not ended; a second call does nothing."""
        if self._num_open:
            self._num_open = 0
            self._engine.cancel(self._request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class EventLoopSink:
    """Passes outputs to the streams of one event loop, which it wakes once per step; an `OutputSink`."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._streams: dict[GenerationRequest, AsyncDeltaStream] = {}
        self._queue = EventLoopQueue(event_loop, self._dispatch)

    def open(
        self,
        engine: TextEngine,
        *requests: GenerationRequest,
        reservation: Reservation | None = None,
        are_all: bool = True,
    ) -> AsyncDeltaStream:
        """Submit requests that belong together, and return their stream; not for an event loop.

        Args:
            engine: generates the answers.
            requests: the requests; the stream has the choices of the first one, then the choices of the next.
            reservation: the slots that are kept for the requests; None: no slots are.
            are_all: False: the client's request has other choices elsewhere, so `requests` may have no token.

        Raises:
            Closed: the reservation was released, because nobody waits for the requests any more.
            GenserveError: see `TextEngine.submit`.
        """
        if reservation is not None and reservation.released:
            raise Closed("the request was given up while it was prepared")
        stream = AsyncDeltaStream(engine, requests, sink=self, are_all=are_all)
        self._streams.update(dict.fromkeys(requests, stream))   # outputs may come before `submit` returns
        try:
            engine.submit(*requests, sink=self, reservation=reservation)
        except BaseException:
            self.forget(requests)
            raise
        return stream

    def deliver(self, outputs: Sequence[GenerationOutput]) -> None:
        """Receive outputs; see `OutputSink`. RuntimeError once the event loop is closed."""
        self._queue.put(outputs)

    def forget(self, requests: Sequence[GenerationRequest]) -> None:
        """Drop later outputs of requests; for the stream."""
        for request in requests:
            self._streams.pop(request, None)

    def _dispatch(self, output: GenerationOutput) -> None:
        stream = self._streams.get(output.request)
        if stream is not None:
            stream.put(output)


class AsyncDeltaStream:
    """An asynchronous iterator over the deltas of requests; made by `EventLoopSink.open`.

    Each iteration returns all deltas that have arrived, at least one, in the order in which they were made.
    Each delta has the number of its choice. If a choice fails, the error is raised after the deltas before
    it, and the other choices are cancelled. The error is DeadlineExceeded if the deadline passes before any
    choice has a token, and the stream has all choices of the client's request.

    Close the stream, or use it as a context manager: a request whose stream is abandoned keeps its blocks.

    Attributes:
        requests: the requests, each with the same number of choices.
        answers: the record of what has arrived of each choice.
    """

    def __init__(
        self,
        engine: TextEngine,
        requests: Sequence[GenerationRequest],
        *,
        sink: EventLoopSink,
        are_all: bool,
    ) -> None:
        self.requests = requests
        self.answers = [AnswerRecord(request) for request in requests for _ in request.seeds]
        self._are_all = are_all
        self._engine = engine
        self._sink = sink
        # The number of the first choice of each request.
        self._first_choices = {request: i * request.num_choices for i, request in enumerate(requests)}
        self._num_open = len(self.answers)
        # Bounded by the longest answers: at most one delta per token.
        self._arrived: deque[tuple[int, Delta | GenserveError]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ahead: list[Delta] = []   # the deltas that `first` has read
        self._last: list[Delta] = []    # the last deltas of the choices that have ended

    def put(self, output: GenerationOutput) -> None:
        """Add an output; for the sink, on the event loop."""
        choice = self._first_choices[output.request] + output.choice
        self.answers[choice].add(output)
        self._arrived.append((choice, output.content))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def first(self) -> None:
        """Wait for the first deltas, which the next iteration returns.

        Raises:
            GenserveError: the request ended before it had a delta.
        """
        self._ahead = await anext(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        if self._ahead:
            ahead, self._ahead = self._ahead, []
            return ahead
        if not self._num_open:
            raise StopAsyncIteration
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas: list[Delta] = []
        while self._arrived:
            choice, content = self._arrived[0]
            if isinstance(content, GenserveError):
                if deltas:
                    break
                self.close()
                raise content
            self._arrived.popleft()
            if content.finish_reason is not None:
                self._num_open -= 1
                self._last.append(content)
            deltas.append(replace(content, choice=choice) if choice else content)
        if not self._num_open:
            self._sink.forget(self.requests)
            if self._are_all:
                require_tokens(self._last)
        return deltas

    @property
    def is_open(self) -> bool:
        """Whether a choice has not ended, as far as the stream was read."""
        return self._num_open > 0

    def end_reasoning(self) -> None:
        """End the reasoning of the choices that have not ended; see `TextEngine.end_reasoning`."""
        for request in self.requests:
            self._engine.end_reasoning(request)

    def close(self) -> None:
        """Cancel the choices that have not ended; a second call does nothing. From any thread."""
        if self._num_open:
            self._num_open = 0
            self._sink.forget(self.requests)
            for request in self.requests:
                self._engine.cancel(request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        self.close()


async def opened(opening: Future[AsyncDeltaStream]) -> AsyncDeltaStream:
    """Return a stream that a worker thread opens; raises its errors.

    If the caller is cancelled, the stream is closed as soon as it is open, since nobody reads it.
    """
    try:
        return await asyncio.wrap_future(opening)
    except BaseException:
        opening.add_done_callback(_close)
        raise


def _close(opening: Future[AsyncDeltaStream]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
