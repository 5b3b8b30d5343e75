"""KServe infer: inference over HTTP, JSON and binary tensors, compressed or not."""

from __future__ import annotations

import zlib

from starlette.concurrency import run_in_threadpool

from genserve.data_type import DataType
from genserve.errors import InferenceError, Status
from genserve.inference import InferenceResponse
from genserve.kserve.infer_answer import InferAnswer, answer_of
from genserve.kserve.infer_body import InferBody, read_infer_body, read_raw_body
from genserve.kserve.leading_number import leading_number
from genserve.kserve.models import ServedModel
from genserve.server.beside import ONE_BY_ONE, beside, work_of
from genserve.server.routes.kserve_call import Answer, Call, error_answer, too_large

__all__ = ["infer"]

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


async def _read(call: Call, model: ServedModel, encoding: str | None) -> InferBody:
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


async def _respond(answer: InferAnswer, *, accepted: str | None) -> Answer:
    body, headers = answer.body, []
    if accepted is not None and (encoding := _preferred(accepted)):
        body = await beside(len(body), _compressed, body, encoding)
        headers.append((b"content-encoding", encoding.encode()))
    if answer.header_length is None:
        return Answer(body, headers=headers)
    headers.append((_HEADER_LENGTH.lower().encode(), str(answer.header_length).encode()))
    return Answer(body, content_type=b"application/octet-stream", headers=headers)


def _writing(response: InferenceResponse, asked: InferBody) -> int:
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
