"""Running inference: one inference of a client, and its responses on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Self, TypeAlias

from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceRequest, InferenceResponse, InferenceServer
from genserve.wakeup import EventLoopQueue

_Item: TypeAlias = tuple[InferenceResponse | None, bool]


class ResponseDispatcher:
    """Hands responses from model threads to one event loop, with one wake-up for all that are queued."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._queue: EventLoopQueue[tuple[Responses, _Item]] = EventLoopQueue(event_loop, _put)

    def post(self, responses: Responses, item: _Item) -> None:
        """Queue one response, from any thread; dropped if the event loop is closed."""
        try:
            self._queue.put(((responses, item),))
        except RuntimeError:
            return


def _put(arrived: tuple[Responses, _Item]) -> None:
    responses, item = arrived
    responses.put(item)


class Responses:
    """The responses of one inference, for one reader on the event loop of the dispatcher."""

    __slots__ = ("_arrived", "_dispatcher", "_error", "_num_read", "_num_sent", "_sender", "_waiter")

    def __init__(self, dispatcher: ResponseDispatcher) -> None:
        self._dispatcher = dispatcher
        self._arrived: deque[_Item] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._num_sent = self._num_read = 0
        self._sender: asyncio.Future[None] | None = None    # that waits for the reader

    def on_response(self, response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001 - OnResponse
        """Queue a response, from any thread; see `OnResponse`."""
        self._num_sent += 1
        self._dispatcher.post(self, (response, final))

    def put(self, item: _Item) -> None:
        """Append a response; for the dispatcher, on the event loop."""
        self._arrived.append(item)
        _wake(self._waiter)

    def abandon(self, error: Exception) -> None:
        """Raise this error in the reader instead of returning further responses; on the event loop."""
        self._error = error
        _wake(self._waiter)
        _wake(self._sender)

    async def next(self) -> tuple[InferenceResponse | None, bool]:
        """Return the next response or None, and whether it is the last; raises the error of `abandon`."""
        while not self._arrived and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        self._num_read += 1
        _wake(self._sender)
        return self._arrived.popleft()

    async def all_read(self) -> None:
        """Wait until the reader has taken all responses that were sent so far, on the event loop."""
        num_sent = self._num_sent
        while self._num_read < num_sent and self._error is None:
            self._sender = asyncio.get_running_loop().create_future()
            await self._sender

    async def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        """Iterate over the responses until the inference ends."""
        final = False
        while not final:
            response, final = await self.next()
            if response is not None:
                yield response


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class RunningInference:
    """One inference of a client. As a context manager it cancels the inference on an early exit.

    Attributes:
        inference: the running inference.
        responses: its responses, for one reader on the event loop.
    """

    __slots__ = ("inference", "responses")

    def __init__(
        self, request: InferenceRequest, *, server: InferenceServer, dispatcher: ResponseDispatcher
    ) -> None:
        """Submit the request; raises what `InferenceServer.submit` raises."""
        self.responses = Responses(dispatcher)
        self.inference = Inference(
            request=request, on_response=self.responses.on_response, all_read=self.responses.all_read
        )
        server.submit(self.inference)

    async def single(self) -> InferenceResponse:
        """Wait for the end and return the only response, which is an error if the model sent none."""
        first, final = None, False
        while not final:
            response, final = await self.responses.next()
            first = first or response
        return first or InferenceResponse(
            error=InferenceError(
                f"model '{self.inference.request.model_name}' ended the request without a response",
                status=Status.INTERNAL,
            )
        )

    def close(self) -> None:
        """Cancel the inference if it still runs."""
        if not self.inference.ended:
            self.inference.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()
