"""Stream: one `ModelStreamInfer` call: many requests, and their responses as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from tritonclient.grpc import service_pb2

from genserve.errors import GenserveError
from genserve.inference import Inference, InferenceResponse
from genserve.kserve.models import Models
from genserve.kserve.outbox import ResponseOutbox, once
from genserve.server.grpc.infer_request import GrpcRequest
from genserve.server.grpc.infer_response import write_response

__all__ = ["InferStream"]

_FINAL = "triton_final_response"


class InferStream:
    """The requests of one stream.

    Responses of models that give one each come in the order of the requests; those of decoupled models as
    they are made. An error is a message, and the stream goes on; with `ends_at_error`, an error of a model
    ends it.
    """

    def __init__(
        self,
        models: Models,
        outbox: ResponseOutbox,
        *,
        read: Callable[[Any], GrpcRequest],
        ends_at_error: bool,
    ) -> None:
        """Begin a stream.

        Args:
            models: the door.
            outbox: of the event loop that the stream is on.
            read: a `ModelInferRequest` to the request; raises GenserveError.
            ends_at_error: the client asked for `triton_grpc_error`.
        """
        self._models = models
        self._outbox = outbox
        self._read = read
        self._ends_at_error = ends_at_error
        self._running: set[Inference] = set()
        self._turns: deque[asyncio.Future[Any]] = deque()   # messages of models that are not decoupled
        self._outgoing: deque[Any] = deque()                # messages, or the error that ends the stream
        self._changed = asyncio.Event()
        self._has_all_requests = False

    async def answers(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Give the `ModelStreamInferResponse` messages; whatever ends this cancels what still runs.

        Raises:
            GenserveError: of a model, with `ends_at_error`.
        """
        reading = asyncio.create_task(self._read_all(messages))
        try:
            while not self._is_over:
                await self._changed.wait()
                self._changed.clear()
                while self._outgoing:
                    message = self._outgoing.popleft()
                    if isinstance(message, GenserveError):
                        raise message
                    yield message
        finally:
            reading.cancel()
            for inference in tuple(self._running):
                inference.cancel()

    @property
    def _is_over(self) -> bool:
        return self._has_all_requests and not (self._running or self._turns or self._outgoing)

    async def _read_all(self, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            self._start(message)
        self._has_all_requests = True
        self._changed.set()

    def _start(self, message: Any) -> None:
        try:
            request = self._read(message)
        except GenserveError as error:
            self._take_turn()(_refusal(message, error))
            return
        put = self._put if request.decoupled else self._take_turn()
        try:
            self._submit(request, put)
        except GenserveError as error:
            put(_refusal(message, error))

    def _submit(self, request: GrpcRequest, put: Callable[[Any], None]) -> None:
        def arrived(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001  # OnResponse
            if response is not None or request.empty_final_response:
                put(self._message(response, inference, final=final))
            if final:
                self._running.discard(inference)
                self._changed.set()

        def answered(response: InferenceResponse) -> None:
            arrived(response, True)  # noqa: FBT003  # OnResponse

        forward = arrived if request.decoupled else once(request.inference, answered)
        inference = Inference(request=request.inference, on_response=self._outbox.to(forward))
        self._models.submit(inference)
        self._running.add(inference)

    def _take_turn(self) -> Callable[[Any], None]:
        """Return what puts a message into the place that the stream has reached now."""
        turn: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)

        def put(message: Any) -> None:
            turn.set_result(message)
            while self._turns and self._turns[0].done():
                self._put(self._turns.popleft().result())

        return put

    def _put(self, message: Any) -> None:
        self._outgoing.append(message)
        self._changed.set()

    def _message(self, response: InferenceResponse | None, inference: Inference, *, final: bool) -> Any:
        if response is not None and response.error is not None and self._ends_at_error:
            return response.error
        message = write_response(response, inference=inference)
        message.parameters[_FINAL].bool_param = final
        error = response.error.message if response is not None and response.error is not None else ""
        return service_pb2.ModelStreamInferResponse(error_message=error, infer_response=message)


def _refusal(message: Any, error: GenserveError) -> Any:
    return service_pb2.ModelStreamInferResponse(
        error_message=error.message, infer_response=service_pb2.ModelInferResponse(id=message.id)
    )
