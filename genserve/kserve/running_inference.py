"""Running inference: one inference of a client, from its submission until nobody waits for it."""

from __future__ import annotations

from typing import Self

from genserve.errors import InferenceError, Status
from genserve.inference import Door, Inference, InferenceRequest, InferenceResponse
from genserve.kserve.outbox import ResponseOutbox

__all__ = ["RunningInference"]


class RunningInference:
    """Use it as a context manager: leaving it early, also because the task is cancelled, cancels it.

    Attributes:
        inference: that runs.
        responses: of it, for one reader on the event loop.
    """

    __slots__ = ("inference", "responses")

    def __init__(self, request: InferenceRequest, *, door: Door, outbox: ResponseOutbox) -> None:
        """Submit the request; raises what `Door.submit` raises."""
        self.responses = outbox.open()
        self.inference = Inference(request=request, on_response=self.responses.on_response)
        door.submit(self.inference)

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
