"""Outbox: responses, handed from the threads of models to whoever awaits them on an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TypeAlias

from genserve.inference import InferenceResponse

__all__ = ["ResponseOutbox", "Responses"]

_Item: TypeAlias = tuple[InferenceResponse | None, bool]


class ResponseOutbox:
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
    """The responses of one inference, for one reader on the event loop; made by `ResponseOutbox.open`."""

    __slots__ = ("_arrived", "_error", "_outbox", "_waiter")

    def __init__(self, outbox: ResponseOutbox) -> None:
        self._outbox = outbox
        self._arrived: deque[_Item] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def on_response(self, response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001 - OnResponse
        """Take a response, on any thread; see `OnResponse`."""
        self._outbox.post(self, (response, final))

    def put(self, item: _Item) -> None:
        """Add what arrived; for the outbox, on the event loop."""
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
