"""KServe generate: plain JSON in, plain JSON out, whole or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import orjson
from starlette.types import Receive, Scope, Send

from genserve.errors import GenserveError, InferenceError, Overloaded, Status
from genserve.inference import Inference, InferenceResponse
from genserve.kserve.failure import failure
from genserve.kserve.generate import event_of, generated, read_generate_body
from genserve.log import fail_request
from genserve.server.beside import ONE_BY_ONE, beside, work_of
from genserve.server.routes.kserve_call import Answer, Call, WatchedInference, error_json, retry_lines

__all__ = ["generate", "generate_stream"]

_NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates "
    "various number of responses"
)


async def generate(call: Call) -> Answer:
    """Run an inference that has exactly one response.

    The status is that of the first response, and as Triton has it 400 for any error, but 429 for a refusal.
    """
    with await _start(call) as running:
        told = [await _tell(response, running.inference) async for response in running.responses]
    body = told[0][0] if len(told) == 1 else orjson.dumps({"error": _NOT_ONE})
    status, headers = _status(told[0][1] if told else None)
    return Answer(body, status_code=status, headers=headers)


async def generate_stream(call: Call) -> EventStream:
    """Run an inference and send each response as an event."""
    return EventStream(await _start(call))


class EventStream:
    """The events of one inference. The status is decided by the first, as that of `generate` is."""

    def __init__(self, running: WatchedInference) -> None:
        self._running = running
        self._started = False

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the events; the ASGI protocol."""
        with self._running as running:
            try:
                async for response in running.responses:
                    text, error = await _tell(response, running.inference)
                    await self._send_event(text, send, *_status(error))
            except asyncio.CancelledError:
                stopped = InferenceError("the server has stopped", status=Status.UNAVAILABLE)
                fail_request(stopped)
                await self._send_event(orjson.dumps(error_json(stopped)), send, 503)
            if not self._started:
                await send(_start_message(200))
            await send({"type": "http.response.body", "body": b""})

    async def _send_event(
        self, text: bytes, send: Send, status: int, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        if not self._started:
            self._started = True
            await send(_start_message(status, headers))
        await send({"type": "http.response.body", "body": event_of(text), "more_body": True})


async def _start(call: Call) -> WatchedInference:
    model = call.services.repository.find(call.model, call.version)
    body = await call.body(limit=call.services.settings.http_max_input_size)
    work = len(body) * ONE_BY_ONE
    return call.start(await beside(work, read_generate_body, body, model=model, version=call.version))


async def _tell(response: InferenceResponse, inference: Inference) -> tuple[bytes, GenserveError | None]:
    """Return a response as JSON, and the error that it is."""
    try:
        work = sum(work_of(tensor, copied=False) for tensor in response.outputs)
        return await beside(work, generated, response, inference=inference), None
    except Exception as error:
        told = failure(error, doing=f"writing a response of model '{inference.model_name}'")
        fail_request(told)
        return orjson.dumps(error_json(told)), told


def _status(error: GenserveError | None) -> tuple[int, Sequence[tuple[bytes, bytes]]]:
    """Return the status of an answer that begins with this error or with none, and its headers."""
    if isinstance(error, Overloaded):
        return 429, retry_lines(error)
    return 200 if error is None else 400, ()


def _start_message(status: int, headers: Sequence[tuple[bytes, bytes]] = ()) -> dict[str, object]:
    content_type = (b"content-type", b"text/event-stream; charset=utf-8")
    lines = [content_type, (b"cache-control", b"no-cache"), *headers]
    return {"type": "http.response.start", "status": status, "headers": lines}


