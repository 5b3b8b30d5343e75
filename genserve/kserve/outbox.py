"""Outbox: responses on their way from the models' threads to one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from genserve.errors import InferenceError, Status
from genserve.inference import Door, Inference, InferenceRequest, InferenceResponse, OnResponse

__all__ = ["Arrived", "ResponseOutbox", "once"]

# Called on the event loop, with what `OnResponse` was called with.
Arrived: TypeAlias = Callable[[InferenceResponse | None, bool], None]


class ResponseOutbox:
    """Hands responses over to an event loop: one wake-up for all that came since the last."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._waiting: deque[tuple[Arrived, InferenceResponse | None, bool]] = deque()
        self._woken = False

    def to(self, arrived: Arrived) -> OnResponse:
        """Return an `OnResponse` for any thread that has `arrived` called on the event loop, in order."""

        def on_response(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001  # OnResponse
            self._waiting.append((arrived, response, final))
            if self._woken:
                return
            self._woken = True
            try:
                self._event_loop.call_soon_threadsafe(self._dispatch)
            except RuntimeError:  # the event loop is closed: nobody waits any more
                self._waiting.clear()

        return on_response

    async def ask(self, door: Door, request: InferenceRequest) -> tuple[Inference, InferenceResponse]:
        """Run a request whose model gives one response; cancelled with the task that waits for it.

        Returns:
            The inference, which knows the version that answered, and its response.

        Raises:
            GenserveError: what `Door.submit` raises, or the error that the model answered with.
        """
        answer: asyncio.Future[InferenceResponse] = self._event_loop.create_future()

        def answered(response: InferenceResponse) -> None:
            if not answer.done():
                answer.set_result(response)

        inference = Inference(request=request, on_response=self.to(once(request, answered)))
        door.submit(inference)
        try:
            response = await answer
        except asyncio.CancelledError:
            inference.cancel()
            raise
        if response.error is not None:
            raise response.error
        return inference, response

    def _dispatch(self) -> None:
        # Reset first: whoever adds to the queue from here on wakes the event loop again.
        self._woken = False
        while self._waiting:
            arrived, response, final = self._waiting.popleft()
            arrived(response, final)


def once(request: InferenceRequest, answered: Callable[[InferenceResponse], None]) -> Arrived:
    """Return what waits for the end of a request and then calls `answered` with its one response."""
    first: InferenceResponse | None = None

    def arrived(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001  # OnResponse
        nonlocal first
        first = first or response
        if final:
            answered(first or _no_response(request))

    return arrived


def _no_response(request: InferenceRequest) -> InferenceResponse:
    return InferenceResponse(
        error=InferenceError(
            f"model '{request.model_name}' ended the request without a response", status=Status.INTERNAL
        )
    )
