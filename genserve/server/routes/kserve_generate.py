"""KServe generate: plain JSON in, plain JSON out, whole or as server-sent events."""

from __future__ import annotations

import asyncio

import orjson
from starlette.types import Receive, Scope, Send

from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceResponse
from genserve.kserve.failure import failure
from genserve.kserve.generate import event_of, generated, read_generate_body
from genserve.log import fail_request
from genserve.server.beside import ONE_BY_ONE, beside, work_of
from genserve.server.routes.kserve_call import Answer, Call, WatchedInference, error_json

__all__ = ["generate", "generate_stream"]

_NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates "
    "various number of responses"
)


async def generate(call: Call) -> Answer:
    """Run an inference that has exactly one response.

    The status is that of the first response, and 400 for any error, as Triton has it.
    """
    with await _start(call) as running:
        told = [await _tell(response, running.inference) async for response in running.responses]
    failed = bool(told) and told[0][1]
    body = told[0][0] if len(told) == 1 else orjson.dumps({"error": _NOT_ONE})
    return Answer(body, status_code=400 if failed else 200)


async def generate_stream(call: Call) -> EventStream:
    """Run an inference and send each response as an event."""
    return EventStream(await _start(call))


class EventStream:
    """The events of one inference. The status is decided by the first: 400 if it is an error."""

    def __init__(self, running: WatchedInference) -> None:
        self._running = running
        self._started = False

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the events; the ASGI protocol."""
        with self._running as running:
            try:
                async for response in running.responses:
                    text, failed = await _tell(response, running.inference)
                    await self._send_event(text, send, status=400 if failed else 200)
            except asyncio.CancelledError:
                error = InferenceError("the server has stopped", status=Status.UNAVAILABLE)
                fail_request(error)
                await self._send_event(orjson.dumps(error_json(error)), send, status=503)
            if not self._started:
                await send(_start_message(200))
            await send({"type": "http.response.body", "body": b""})

    async def _send_event(self, text: bytes, send: Send, *, status: int) -> None:
        if not self._started:
            self._started = True
            await send(_start_message(status))
        await send({"type": "http.response.body", "body": event_of(text), "more_body": True})


async def _start(call: Call) -> WatchedInference:
    model = call.services.repository.find(call.model, call.version)
    body = await call.body(limit=call.services.settings.http_max_input_size)
    work = len(body) * ONE_BY_ONE
    return call.start(await beside(work, read_generate_body, body, model=model, version=call.version))


async def _tell(response: InferenceResponse, inference: Inference) -> tuple[bytes, bool]:
    """Return a response as JSON, and whether it is an error."""
    try:
        work = sum(work_of(tensor, copied=False) for tensor in response.outputs)
        return await beside(work, generated, response, inference=inference), False
    except Exception as error:
        told = failure(error, doing=f"writing a response of model '{inference.model_name}'")
        fail_request(told)
        return orjson.dumps(error_json(told)), True


def _start_message(status: int) -> dict[str, object]:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    return {"type": "http.response.start", "status": status, "headers": headers}


