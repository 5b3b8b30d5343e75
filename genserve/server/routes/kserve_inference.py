"""KServe inference: `infer`, with JSON and binary tensors, `generate` and `generate_stream` over HTTP."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from genserve.errors import GenserveError, InferenceError, Overloaded, Status
from genserve.inference import Inference, InferenceResponse
from genserve.kserve.generate_extension import event_of, generated, read_generate_body
from genserve.kserve.infer_body import (
    InferRequestBody,
    InferResponseBody,
    answer_of,
    read_infer_body,
    read_raw_body,
)
from genserve.kserve.served_models import ServedModel
from genserve.kserve.triton_parsing import leading_number
from genserve.log import fail_request
from genserve.server.error_responses import failure
from genserve.server.offload import ONE_BY_ONE, beside, work_of
from genserve.server.routes.kserve_http import (
    Answer,
    Call,
    WatchedInference,
    error_answer,
    error_json,
    retry_lines,
    too_large,
)
from genserve.tensor import DataType

__all__ = ["generate", "generate_stream", "infer"]


_HEADER_LENGTH = "Inference-Header-Content-Length"
_MAX_BODY_BYTES = 2**31 - 1
_WINDOW_BITS = {"gzip": 31, "deflate": 15}  # of zlib


async def infer(call: Call) -> Answer:
    """Run one inference."""
    model = call.services.repository.find(call.model, call.version)
    if model.config.decoupled:
        raise InferenceError(
            "HTTP end point doesn't support models with decoupled transaction policy",
            status=Status.UNSUPPORTED,
            remedy="use generate_stream, or a gRPC stream",
        )
    encoding = call.header(b"content-encoding")
    if encoding not in (None, "identity", *_WINDOW_BITS):
        error = InferenceError("Unsupported compression type", status=Status.UNSUPPORTED)
        return error_answer(error, headers=[(b"accept-encoding", b"gzip, deflate")])
    asked = await _read(call, model, encoding)
    with call.start(asked.request) as running:
        first = await running.single()
    if first.error is not None:
        raise first.error
    answer = await beside(
        _writing(first, asked), answer_of, first, inference=running.inference, asked=asked, model=model
    )
    return await _respond(answer, accepted=call.header(b"accept-encoding"))


async def _read(call: Call, model: ServedModel, encoding: str | None) -> InferRequestBody:
    limit = call.services.settings.http_max_input_size
    text = call.header(_HEADER_LENGTH.lower().encode())
    given = None if text is None else _header_length(text)
    body_limit = limit if given is None else _MAX_BODY_BYTES
    body = await call.body(limit=body_limit, offset=max(given or 0, 0))
    if encoding in _WINDOW_BITS:
        body = await run_in_threadpool(_decompressed, body, encoding, limit=body_limit)
    length = len(body) if given is None else given
    if not 0 <= length <= len(body):
        raise InferenceError(
            f"inference header size should be in range (0, {len(body)}), got: {text}"
        )
    if length > limit:
        raise too_large(length, limit=limit)
    version = call.version
    parameters = call.forwarded_headers()
    if not length:
        return read_raw_body(body, model=model, version=version, parameters=parameters)
    has_strings = any(spec.data_type == DataType.BYTES.config_name for spec in model.config.inputs)
    return await beside(
        length + (len(body) - length) * (ONE_BY_ONE if has_strings else 1),
        read_infer_body,
        body[:length],
        body[length:],
        model=model,
        version=version,
        shared_memory=call.services.shared_memory,
        parameters=parameters,
    )


async def _respond(answer: InferResponseBody, *, accepted: str | None) -> Answer:
    body, headers = answer.body, []
    if accepted is not None and (encoding := _preferred(accepted)):
        body = await beside(len(body), _compressed, body, encoding)
        headers.append((b"content-encoding", encoding.encode()))
    if answer.header_length is None:
        return Answer(body, headers=headers)
    headers.append((_HEADER_LENGTH.lower().encode(), str(answer.header_length).encode()))
    return Answer(body, content_type=b"application/octet-stream", headers=headers)


def _writing(response: InferenceResponse, asked: InferRequestBody) -> int:
    """Return how much work it is to write a response."""
    work = 0
    for tensor in response.outputs:
        requested = asked.outputs.get(tensor.name)
        copied = asked.binary if requested is None else requested.binary or requested.target is not None
        work += work_of(tensor, copied=copied)
    return work


def _header_length(text: str) -> int:
    """Read a length as Triton does, which passes over what follows the number."""
    length = leading_number(text)
    if length is None:
        raise InferenceError(f"Unable to parse {_HEADER_LENGTH}, got: {text}")
    return length


def _decompressed(body: memoryview, encoding: str, *, limit: int) -> memoryview:
    """Return what was compressed, writable; raises InferenceError, also for more than `limit` bytes."""
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        text = decompressor.decompress(body, limit + 1)
    except zlib.error:
        text = b""
    if len(text) > limit:
        raise too_large(len(text), limit=limit)
    if not decompressor.eof:
        raise InferenceError(f"the body is not {encoding}, as its Content-Encoding says")
    return memoryview(bytearray(text))


def _compressed(body: bytes, encoding: str) -> bytes:
    compressor = zlib.compressobj(wbits=_WINDOW_BITS[encoding])
    return compressor.compress(body) + compressor.flush()


def _preferred(accepted: str) -> str | None:
    """Return the compression that a client likes best of those that there are; None: none of them."""
    best, weight = None, 0.0
    for entry in accepted.split(","):
        name, _, quality = entry.strip().partition(";")
        try:
            liked = float(quality.strip().removeprefix("q=") or 1)
        except ValueError:
            continue
        if name.strip() in _WINDOW_BITS and liked > weight:
            best, weight = name.strip(), liked
    return best


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
