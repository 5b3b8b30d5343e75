"""Call: one inference of a client, and its responses as messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceResponse
from genserve.kserve.models import Models
from genserve.kserve.outbox import EventLoopOutbox
from genserve.server.grpc.infer_request import GrpcRequest

__all__ = ["Call"]


class Call:
    """A request that runs; whoever stops waiting for it, because his task is cancelled, cancels it."""

    def __init__(self, request: GrpcRequest, *, models: Models, outbox: EventLoopOutbox) -> None:
        """Submit the request; raises what `Door.submit` raises."""
        self.request = request
        self._responses = outbox.open()
        self.inference = Inference(request=request.inference, on_response=self._responses.on_response)
        models.submit(self.inference)

    async def single(self) -> InferenceResponse:
        """Wait for the end, and return the one response."""
        first, final = None, False
        try:
            while not final:
                response, final = await self._responses.next()
                first = first or response
        except asyncio.CancelledError:
            self.inference.cancel()
            raise
        return first or InferenceResponse(error=_no_response(self.request))

    async def all(self) -> AsyncIterator[tuple[InferenceResponse | None, bool]]:
        """Iterate over the responses, and whether each is the last, which may be None."""
        final = False
        try:
            while not final:
                response, final = await self._responses.next()
                yield response, final
        except (asyncio.CancelledError, GeneratorExit):
            self.inference.cancel()
            raise


def _no_response(request: GrpcRequest) -> InferenceError:
    return InferenceError(
        f"model '{request.model.name}' ended the request without a response", status=Status.INTERNAL
    )
