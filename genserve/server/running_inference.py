"""Running inference: one inference of a client, and its responses on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Self, TypeAlias

from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceRequest, InferenceResponse, InferenceServer

__all__ = ["ResponseDispatcher", "Responses", "RunningInference"]


_Item: TypeAlias = tuple[InferenceResponse | None, bool]


class ResponseDispatcher:
    """Hands responses to one event loop: one wake-up of it for all that arrive meanwhile."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._arrived: deque[tuple[Responses, _Item]] = deque()
        self._woken = False

    def open(self) -> Responses:
        """Return where the responses of one inference go."""
        return Responses(self)

    def post(self, responses: Responses, item: _Item) -> None:
        """Hand over one response, from any thread; once the event loop is closed, nobody reads it."""
        self._arrived.append((responses, item))
        if self._woken:
            return
        self._woken = True
        try:
            self._event_loop.call_soon_threadsafe(self._dispatch)
        except RuntimeError:
            self._arrived.clear()

    def _dispatch(self) -> None:
        # First, so that what is appended from here on wakes the loop again.
        self._woken = False
        while self._arrived:
            responses, item = self._arrived.popleft()
            responses.put(item)


class Responses:
    """The responses of one inference, for one reader on the event loop; made by `ResponseDispatcher.open`."""

    __slots__ = ("_arrived", "_dispatcher", "_error", "_waiter")

    def __init__(self, dispatcher: ResponseDispatcher) -> None:
        self._dispatcher = dispatcher
        self._arrived: deque[_Item] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def on_response(self, response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001 - OnResponse
        """Take a response, on any thread; see `OnResponse`."""
        self._dispatcher.post(self, (response, final))

    def put(self, item: _Item) -> None:
        """Add what arrived; for the dispatcher, on the event loop."""
        self._arrived.append(item)
        self._wake()

    def abandon(self, error: Exception) -> None:
        """Let the reader have this error in place of all that follows; on the event loop."""
        self._error = error
        self._wake()

    async def next(self) -> tuple[InferenceResponse | None, bool]:
        """Return the next response, or None, and whether it is the last; raises what `abandon` was given."""
        while not self._arrived and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        return self._arrived.popleft()

    async def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        """Iterate over the responses until the inference ends."""
        final = False
        while not final:
            response, final = await self.next()
            if response is not None:
                yield response

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RunningInference:
    """Use it as a context manager: leaving it early, also because the task is cancelled, cancels it.

    Attributes:
        inference: that runs.
        responses: of it, for one reader on the event loop.
    """

    __slots__ = ("inference", "responses")

    def __init__(
        self, request: InferenceRequest, *, server: InferenceServer, dispatcher: ResponseDispatcher
    ) -> None:
        """Submit the request; raises what `InferenceServer.submit` raises."""
        self.responses = dispatcher.open()
        self.inference = Inference(request=request, on_response=self.responses.on_response)
        server.submit(self.inference)

    async def single(self) -> InferenceResponse:
        """Wait for the end, and return the one response; one that never came is an error."""
        first, final = None, False
        while not final:
            response, final = await self.responses.next()
            first = first or response
        return first or InferenceResponse(
            error=InferenceError(
                f"model '{self.inference.model_name}' ended the request without a response",
                status=Status.INTERNAL,
            )
        )

    def close(self) -> None:
        """Stop the inference if it still runs."""
        if not self.inference.ended:
            self.inference.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()
