"""Infer stream: the requests of one `ModelStreamInfer` call, and their responses as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import grpc
from tritonclient.grpc import service_pb2

from genserve.errors import GenserveError
from genserve.inference import InferenceResponse
from genserve.redaction import redacted_error
from genserve.request_context import RequestContext, current_request
from genserve.server.error_formats import message_of
from genserve.server.error_statuses import as_genserve_error
from genserve.server.kserve.grpc.infer_messages import GrpcRequest, empty_response, write_response
from genserve.server.kserve.grpc.rpc_method import MalformedMessage, status_code
from genserve.server.kserve.running_inference import RunningInference
from genserve.tracing import Span

# Parses a `ModelInferRequest` and starts its inference.
Submit: TypeAlias = Callable[[Any], Awaitable[tuple[GrpcRequest, RunningInference]]]

_FINAL = "triton_final_response"


class _Outgoing(NamedTuple):
    message: Any            # None: nothing to send, only the trace to close
    cause: Span | None      # None: it is not traced
    final: bool


class InferStream:
    """The requests of one stream.

    Responses of models with one response each are sent in the order of the requests, those of decoupled
    models as they come. An error is a message, after which the stream goes on; with `ends_at_error`, an error
    of a model ends it.
    """

    def __init__(
        self,
        submit: Submit,
        *,
        begin: Callable[[Any], RequestContext],
        log: Callable[[RequestContext, grpc.StatusCode], None],
        ends_at_error: bool,
    ) -> None:
        """Begin a stream.

        Args:
            submit: may raise anything.
            begin: called for each message, see `begin_request`.
            log: called for each request that has ended.
            ends_at_error: the client has set `triton_grpc_error`.
        """
        self._submit = submit
        self._begin_request = begin
        self._log = log
        self._ends_at_error = ends_at_error
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_turn: asyncio.Task[None] | None = None       # the last answer of a model with one response
        # Messages, then the error that ends the stream, or None.
        self._outgoing: asyncio.Queue[_Outgoing | GenserveError | None] = asyncio.Queue()
        self._traced: set[Span] = set()     # whose last message is not sent yet

    async def answers(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield the `ModelStreamInferResponse` messages; at the end, cancel the inferences that still run.

        Raises:
            GenserveError: a model failed, with `ends_at_error`; or the stream cannot be read.
        """
        reading = asyncio.create_task(self._read_all(messages))
        try:
            while (outgoing := await self._outgoing.get()) is not None:
                if isinstance(outgoing, GenserveError):
                    raise outgoing
                if outgoing.cause is None:
                    yield outgoing.message
                    continue
                if outgoing.message is not None:
                    outgoing.cause.record("GRPC_SEND_START")
                    yield outgoing.message
                    outgoing.cause.record("GRPC_SEND_END")
                if outgoing.final:
                    self._traced.discard(outgoing.cause)
                    _close(outgoing.cause)
        finally:
            for task in (reading, *self._tasks):
                task.cancel()
            for cause in self._traced:
                _close(cause)

    async def _read_all(self, messages: AsyncIterator[Any]) -> None:
        end: GenserveError | None = None
        try:
            async for message in messages:
                if isinstance(message, MalformedMessage):
                    raise message
                await self._begin(message)
            while self._tasks:
                await asyncio.wait(self._tasks)
        except Exception as error:
            end = as_genserve_error(error, doing="a stream")
        finally:
            self._outgoing.put_nowait(end)

    async def _begin(self, message: Any) -> None:
        logged = self._begin_request(message)     # for the tasks created from here on
        try:
            request, running = await self._submit(message)
        except asyncio.CancelledError:
            self._log(logged, grpc.StatusCode.CANCELLED)
            raise
        except Exception as error:
            doing = f"a request to model '{message.model_name}'"
            rejected = as_genserve_error(error, doing=doing)
            logged.fail(rejected)
            self._log(logged, status_code(rejected))
            self._take_turn(partial(_rejection, message, rejected))
            return
        cause = request.inference.cause
        if cause is not None:
            self._traced.add(cause)
        if request.model.config.decoupled:
            task = self._start(self._forward(request, running))
        else:
            task = self._take_turn(partial(self._single, request, running), cause=cause)
        # A callback, as a task may be cancelled before it has begun.
        task.add_done_callback(partial(self._end, running, logged))

    def _end(self, running: RunningInference, logged: RequestContext, task: asyncio.Task[None]) -> None:
        running.close()
        code = grpc.StatusCode.OK if logged.error is None else status_code(logged.error)
        self._log(logged, grpc.StatusCode.CANCELLED if task.cancelled() else code)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _take_turn(
        self, answer: Callable[[], Awaitable[Any]], *, cause: Span | None = None
    ) -> asyncio.Task[None]:
        self._last_turn = self._start(self._put_after(self._last_turn, answer, cause=cause))
        return self._last_turn

    async def _put_after(
        self, turn: asyncio.Task[None] | None, answer: Callable[[], Awaitable[Any]], *, cause: Span | None
    ) -> None:
        message = await answer()
        if turn is not None:
            await asyncio.wait({turn})
        self._put(message, cause=cause, final=True)

    def _put(self, message: Any, *, cause: Span | None, final: bool) -> None:
        ends = isinstance(message, GenserveError)
        self._outgoing.put_nowait(message if ends else _Outgoing(message, cause, final))

    async def _single(self, request: GrpcRequest, running: RunningInference) -> Any:
        return await self._message(await running.single(), request, running, final=True)

    async def _forward(self, request: GrpcRequest, running: RunningInference) -> None:
        cause = request.inference.cause
        final = False
        while not final:
            response, final = await running.responses.next()
            message = None
            if response is not None or request.empty_final_response:
                message = await self._message(response, request, running, final=final)
            if message is not None or cause is not None:
                self._put(message, cause=cause, final=final)

    async def _message(
        self,
        response: InferenceResponse | None,
        request: GrpcRequest,
        running: RunningInference,
        *,
        final: bool,
    ) -> Any:
        error = None if response is None else response.error
        message = empty_response(request)
        if response is not None and error is None:
            try:
                message = await write_response(response, request=request, inference=running.inference)
            except Exception as unwritable:
                doing = f"writing a response of model '{request.model.name}'"
                error = as_genserve_error(unwritable, doing=doing)
        if error is not None:
            current_request().fail(error)
            if self._ends_at_error:
                return error
        message.parameters[_FINAL].bool_param = final
        return _stream_message(message, error)


def _close(cause: Span) -> None:
    if cause.trace is not None:
        cause.trace.close()


async def _rejection(message: Any, error: GenserveError) -> Any:
    return _stream_message(service_pb2.ModelInferResponse(id=message.id), error)


def _stream_message(response: Any, error: GenserveError | None) -> Any:
    text = "" if error is None else message_of(redacted_error(error))
    return service_pb2.ModelStreamInferResponse(error_message=text, infer_response=response)
