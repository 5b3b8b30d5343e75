"""Stream: one `ModelStreamInfer` call: many requests, and their responses as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from tritonclient.grpc import service_pb2

from genserve.errors import GenserveError
from genserve.inference import InferenceResponse
from genserve.server.grpc.call import Call
from genserve.server.grpc.infer_response import empty_response, write_response

__all__ = ["InferStream"]

_FINAL = "triton_final_response"


class InferStream:
    """The requests of one stream.

    Responses of models that give one each come in the order of the requests; those of decoupled models as
    they are made. An error is a message, and the stream goes on; with `ends_at_error`, an error of a model
    ends it.
    """

    def __init__(self, submit: Callable[[Any], Call], *, ends_at_error: bool) -> None:
        """Begin a stream.

        Args:
            submit: begins the inference that a `ModelInferRequest` asks for; raises GenserveError.
            ends_at_error: the client asked for `triton_grpc_error`.
        """
        self._submit = submit
        self._ends_at_error = ends_at_error
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_turn: asyncio.Task[None] | None = None       # of the models that give one response
        # Messages; the error that ends the stream; None after the last.
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()

    async def answers(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Give the `ModelStreamInferResponse` messages; whatever ends this cancels what still runs.

        Raises:
            GenserveError: of a model, with `ends_at_error`.
        """
        reading = asyncio.create_task(self._read_all(messages))
        try:
            while (message := await self._outgoing.get()) is not None:
                if isinstance(message, GenserveError):
                    raise message
                yield message
        finally:
            for task in (reading, *self._tasks):
                task.cancel()

    async def _read_all(self, messages: AsyncIterator[Any]) -> None:
        try:
            async for message in messages:
                self._begin(message)
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self._outgoing.put_nowait(None)

    def _begin(self, message: Any) -> None:
        try:
            call = self._submit(message)
        except GenserveError as error:
            self._take_turn(_refusal(message, error))
            return
        if call.request.model.config.decoupled:
            self._start(self._forward(call))
        else:
            self._take_turn(self._single(call))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _take_turn(self, answer: Coroutine[Any, Any, Any]) -> None:
        self._last_turn = self._start(self._put_after(self._last_turn, answer))

    async def _put_after(self, turn: asyncio.Task[None] | None, answer: Coroutine[Any, Any, Any]) -> None:
        message = await answer
        if turn is not None:
            await asyncio.wait({turn})
        self._outgoing.put_nowait(message)

    async def _single(self, call: Call) -> Any:
        return self._message(await call.single(), call, final=True)

    async def _forward(self, call: Call) -> None:
        async for response, final in call.all():
            if response is not None or call.request.empty_final_response:
                self._outgoing.put_nowait(self._message(response, call, final=final))

    def _message(self, response: InferenceResponse | None, call: Call, *, final: bool) -> Any:
        error = None if response is None else response.error
        message = empty_response(call.request)
        if response is not None and error is None:
            try:
                message = write_response(response, request=call.request, inference=call.inference)
            except GenserveError as unwritable:
                error = unwritable
        if error is not None and self._ends_at_error:
            return error
        message.parameters[_FINAL].bool_param = final
        return service_pb2.ModelStreamInferResponse(
            error_message="" if error is None else error.message, infer_response=message
        )


async def _refusal(message: Any, error: GenserveError) -> Any:
    return service_pb2.ModelStreamInferResponse(
        error_message=error.message, infer_response=service_pb2.ModelInferResponse(id=message.id)
    )
