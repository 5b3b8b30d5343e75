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
from genserve.repository.model_versions import ModelVersion
from genserve.request_context import current_request
from genserve.server.error_formats import kserve_error
from genserve.server.error_statuses import as_genserve_error, kserve_status
from genserve.server.http.offload import COST_PER_OBJECT_BYTE, offload_if_large, write_cost
from genserve.server.http.sse_response import PING, PING_S
from genserve.server.kserve.generate_extension import event_of, generated, read_generate_body
from genserve.server.kserve.http_messages import (
    KServeCall,
    KServeResponse,
    WatchedInference,
    error_response,
    header_lines,
    too_large,
)
from genserve.server.kserve.infer_body import (
    InferRequestBody,
    InferResponseBody,
    read_infer_body,
    read_raw_body,
    write_infer_response,
)
from genserve.server.kserve.triton_parsing import leading_number
from genserve.tensor import DataType

_HEADER_LENGTH = "Inference-Header-Content-Length"
_MAX_BODY_BYTES = 2**31 - 1
_WINDOW_BITS = {"gzip": 31, "deflate": 15}  # zlib's parameter
_NOT_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates "
    "various number of responses"
)


async def infer(call: KServeCall) -> KServeResponse:
    """Run one inference."""
    encoding = call.header(b"content-encoding")
    if encoding not in (None, "identity", *_WINDOW_BITS):
        error = InferenceError("Unsupported compression type", status=Status.UNSUPPORTED)
        return error_response(error, headers=[(b"accept-encoding", b"gzip, deflate")])
    received, length = await _receive(call, encoding)
    await call.services.use_model(call.model)
    model = call.services.repository.find(call.model, call.version)
    if model.config.decoupled:
        raise InferenceError(
            "HTTP end point doesn't support models with decoupled transaction policy",
            status=Status.UNSUPPORTED,
            remedy="use generate_stream, or a gRPC stream",
        )
    body = await _read(call, model, received, length)
    with call.start(body.request) as running:
        response = await running.single()
    if response.error is not None:
        raise response.error
    written = await offload_if_large(
        _write_cost(response, body),
        write_infer_response,
        response,
        inference=running.inference,
        request_body=body,
        model=model,
    )
    return await _compressed_response(written, accepted=call.header(b"accept-encoding"))


async def _receive(call: KServeCall, encoding: str | None) -> tuple[memoryview, int]:
    """Return the decompressed body, and the length of its JSON; 0: it is a raw tensor."""
    limit = call.services.settings.http_max_input_size
    text = call.header(_HEADER_LENGTH.lower().encode())
    given = None if text is None else _header_length(text)
    body_limit = limit if given is None else _MAX_BODY_BYTES
    body = await call.body(limit=body_limit, offset=max(given or 0, 0))
    if encoding in _WINDOW_BITS:
        body = await run_in_threadpool(_decompress, body, encoding, limit=limit)
    length = len(body) if given is None else given
    if not 0 <= length <= len(body):
        raise InferenceError(f"inference header size should be in range (0, {len(body)}), got: {text}")
    if length > limit:
        raise too_large(length, limit=limit)
    if not length and len(body) > limit:
        raise _beyond(f"Raw input has a byte_size ({len(body)} bytes) that", limit=limit)
    return body, length


async def _read(call: KServeCall, model: ModelVersion, body: memoryview, length: int) -> InferRequestBody:
    version = call.version
    parameters = call.forwarded_headers()
    if not length:
        return read_raw_body(body, model=model, version=version, parameters=parameters)
    has_strings = any(spec.data_type == DataType.BYTES.config_name for spec in model.config.inputs)
    return await offload_if_large(
        length + (len(body) - length) * (COST_PER_OBJECT_BYTE if has_strings else 1),
        read_infer_body,
        body[:length],
        body[length:],
        model=model,
        version=version,
        shared_memory=call.state.shared_memory,
        parameters=parameters,
    )


def _header_length(text: str) -> int:
    """Parse a length as Triton does, which ignores text after the number."""
    length = leading_number(text)
    if length is None:
        raise InferenceError(f"Unable to parse {_HEADER_LENGTH}, got: {text}")
    return length


def _beyond(what: str, *, limit: int) -> InferenceError:
    return InferenceError(
        f"{what} exceeds the maximum allowed value of {limit} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def _decompress(body: memoryview, encoding: str, *, limit: int) -> memoryview:
    """Return the decompressed body, writable; raises InferenceError, also for more than `limit` bytes."""
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        text = decompressor.decompress(body, limit + 1)
    except zlib.error:
        text = b""
    if len(text) > limit:
        raise _beyond("Decompressed data size", limit=limit)
    if not decompressor.eof:
        raise InferenceError(f"the body is not {encoding}, as its Content-Encoding says")
    return memoryview(bytearray(text))


def _write_cost(response: InferenceResponse, body: InferRequestBody) -> int:
    cost = 0
    for tensor in response.outputs:
        requested = body.requested(tensor.name)
        cost += write_cost(tensor, copied=requested.binary or requested.target is not None)
    return cost


async def _compressed_response(answer: InferResponseBody, *, accepted: str | None) -> KServeResponse:
    body, headers = answer.body, []
    if accepted is not None and (encoding := _preferred(accepted)):
        body = await offload_if_large(len(body), _compress, body, encoding)
        headers.append((b"content-encoding", encoding.encode()))
    if answer.header_length is None:
        return KServeResponse(body, headers=headers)
    headers.append((_HEADER_LENGTH.lower().encode(), str(answer.header_length).encode()))
    return KServeResponse(body, content_type=b"application/octet-stream", headers=headers)


def _preferred(accepted: str) -> str | None:
    """Return the supported compression with the highest weight in Accept-Encoding; None: there is none."""
    best, weight = None, 0.0
    for entry in accepted.split(","):
        name, _, quality = entry.strip().partition(";")
        try:
            given = float(quality.strip().removeprefix("q=") or 1)
        except ValueError:
            continue
        if name.strip() in _WINDOW_BITS and given > weight:
            best, weight = name.strip(), given
    return best


def _compress(body: bytes, encoding: str) -> bytes:
    compressor = zlib.compressobj(wbits=_WINDOW_BITS[encoding])
    return compressor.compress(body) + compressor.flush()


async def generate(call: KServeCall) -> KServeResponse:
    """Run an inference that has exactly one response, from plain JSON to plain JSON."""
    with await _start_generate(call, await call.plain_body()) as running:
        written = [await _write(response, running.inference) async for response in running.responses]
    body = written[0][0] if len(written) == 1 else orjson.dumps({"error": _NOT_ONE_RESPONSE})
    status, headers = _status(written[0][1] if written else None)
    return KServeResponse(body, status_code=status, headers=headers)


async def generate_stream(call: KServeCall) -> ResponseEvents:
    """Run an inference and send each response as an event."""
    body = await call.plain_body()      # before the first ping
    starting = asyncio.ensure_future(_start_generate(call, body))
    try:
        if not (await asyncio.wait([starting], timeout=PING_S))[1]:
            starting.result()   # its error decides the status
    except BaseException:
        starting.cancel()
        raise
    return ResponseEvents(starting)


class ResponseEvents:
    """The responses of one inference as server-sent events; the first decides the status.

    If there is none by the time of the first ping, the status is 200, and later errors are events.
    """

    def __init__(self, starting: asyncio.Task[WatchedInference]) -> None:
        """Take the start of an inference, which may wait until its model is loaded."""
        self._starting = starting
        self._started = False
        self._sending = asyncio.Lock()

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the events; the ASGI protocol."""
        pinging = asyncio.ensure_future(self._ping(send))
        try:
            with await self._starting as running:
                async for response in running.responses:
                    text, error = await _write(response, running.inference)
                    await self._send(event_of(text), send, *_status(error))
        except asyncio.CancelledError:
            stopped = InferenceError("the server has stopped", status=Status.UNAVAILABLE)
            await self._send(_error_event(stopped), send, kserve_status(stopped))
        except GenserveError as error:      # of a load that took longer than the first ping
            await self._send(_error_event(error), send, *_status(error))
        finally:
            pinging.cancel()
            self._starting.cancel()
        await self._send(b"", send, 200, more=False)

    async def _ping(self, send: Send) -> None:
        if self._starting.done():
            await asyncio.sleep(PING_S)
        while True:
            await self._send(PING, send, 200)
            await asyncio.sleep(PING_S)

    async def _send(
        self,
        body: bytes,
        send: Send,
        status: int,
        headers: Sequence[tuple[bytes, bytes]] = (),
        *,
        more: bool = True,
    ) -> None:
        async with self._sending:
            if not self._started:
                self._started = True
                await send(_start_message(status, headers))
            await send({"type": "http.response.body", "body": body, "more_body": more})


async def _start_generate(call: KServeCall, body: memoryview) -> WatchedInference:
    await call.services.use_model(call.model)
    model = call.services.repository.find(call.model, call.version)
    request = await offload_if_large(
        len(body) * COST_PER_OBJECT_BYTE, read_generate_body, body, model=model, version=call.version
    )
    return call.start(request)


def _error_event(error: GenserveError) -> bytes:
    current_request().fail(error)
    return event_of(orjson.dumps(kserve_error(error)))


async def _write(response: InferenceResponse, inference: Inference) -> tuple[bytes, GenserveError | None]:
    """Return a response as JSON, and its error."""
    try:
        cost = sum(write_cost(tensor, copied=False) for tensor in response.outputs)
        return await offload_if_large(cost, generated, response, inference=inference), None
    except Exception as raised:
        doing = f"writing a response of model '{inference.request.model_name}'"
        error = as_genserve_error(raised, doing=doing)
        current_request().fail(error)
        return orjson.dumps(kserve_error(error)), error


def _status(error: GenserveError | None) -> tuple[int, Sequence[tuple[bytes, bytes]]]:
    """Return the status and headers of an answer that begins with this error or with none.

    As in Triton it is 400 for any error; our own exception is a full queue.
    """
    if error is None:
        return 200, ()
    return kserve_status(error) if isinstance(error, Overloaded) else 400, header_lines(error)


def _start_message(status: int, headers: Sequence[tuple[bytes, bytes]] = ()) -> dict[str, object]:
    content_type = (b"content-type", b"text/event-stream; charset=utf-8")
    lines = [content_type, (b"cache-control", b"no-cache"), *headers]
    return {"type": "http.response.start", "status": status, "headers": lines}
