"""KServe HTTP: one HTTP request of the KServe protocol, and the responses that all of its routes give."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from genserve.errors import GenserveError, InferenceError, Overloaded, Status, Unauthenticated, status_of
from genserve.inference import InferenceRequest, InferenceServer, Parameter
from genserve.kserve.triton_parsing import read_json, read_version
from genserve.log import fail_request
from genserve.redaction import redacted_error
from genserve.server.error_responses import http_status, retry_headers, text_of
from genserve.server.offload import beside
from genserve.server.running_inference import ResponseDispatcher, RunningInference
from genserve.server.services import Services
from genserve.server.sse_response import ClientLeft
from genserve.tracing import Trace

__all__ = [
    "Answer",
    "Call",
    "WatchedInference",
    "error_answer",
    "error_json",
    "json_answer",
    "message_answer",
    "refusal_answer",
    "retry_lines",
    "too_large",
]


_HTTP_STATUS: Mapping[Status, int] = {
    Status.NOT_FOUND: 404,
    Status.UNAVAILABLE: 503,
    Status.UNSUPPORTED: 501,
    Status.INTERNAL: 500,
}  # all others: 400
_JSON = b"application/json"
# So long an answer may take before the socket is watched for the client's leaving: a task for each of
# many short requests would cost more than those that are left early.
_PATIENCE_S = 0.01


class Call:
    """A request.

    Attributes:
        services: of the server.
        names: what the path says: model, version, region, repository; "" where it does not.
        trace: of it; None: it is not traced.
    """

    __slots__ = ("_receive", "_scope", "names", "services", "trace")

    def __init__(
        self, services: Services, *, scope: Scope, receive: Receive, names: Mapping[str, str]
    ) -> None:
        self.services = services
        self.names = names
        self.trace: Trace | None = None
        self._scope = scope
        self._receive = receive

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.names["model"]

    @property
    def version(self) -> int:
        """The version that is asked for; -1: the latest. Raises InferenceError."""
        return read_version(self.names.get("version", ""))

    def header(self, name: bytes) -> str | None:
        """Return the value of a header, by its name in lower case."""
        for key, value in self._scope["headers"]:
            if key == name:
                text: str = value.decode("latin-1")
                return text
        return None

    def forwarded_headers(self) -> dict[str, Parameter]:
        """Return the headers that become parameters of the request."""
        pattern = self.services.settings.http_header_forward_pattern
        if not pattern:
            return {}
        search = re.compile(pattern, re.IGNORECASE).search
        headers = ((key.decode("latin-1"), value.decode("latin-1")) for key, value in self._scope["headers"])
        return {key: value for key, value in headers if search(key)}

    async def body(self, *, limit: int, offset: int = 0) -> memoryview:
        """Return the body, writable, in one piece.

        Args:
            limit: how long it may be, bytes.
            offset: of a byte that is to lie where numbers may lie.

        Raises:
            InferenceError: it is longer than the limit.
            ClientLeft: it did not come whole.
        """
        padding = -offset % 16
        chunks = [bytes(padding)]
        size = 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise too_large(int(self.header(b"content-length") or size), limit=limit)
        if self.trace is not None:
            self.trace.note("HTTP_RECV_END")
        return memoryview(bytearray().join(chunks))[padding:]

    async def json(self) -> Any:
        """Return the parsed body; None: it is empty. Raises InferenceError."""
        body = await self.body(limit=self.services.settings.http_max_input_size)
        return await beside(len(body), read_json, body) if body else None

    def start(self, request: InferenceRequest) -> WatchedInference:
        """Submit a request to its model; raises what `InferenceServer.submit` raises."""
        if self.services.draining:
            text = "Server is stopping, new inference requests are not accepted"
            raise InferenceError(text, status=Status.UNAVAILABLE, remedy="try again on another server")
        if self.trace is not None:
            request = replace(request, cause=self.trace.root)
        return WatchedInference(
            request,
            server=self.services.repository,
            outbox=self.services.response_dispatcher(),
            receive=self._receive,
        )


class WatchedInference(RunningInference):
    """An inference that is cancelled, too, when its client closes the connection."""

    __slots__ = ("_receive", "_timer", "_watch")

    def __init__(
        self,
        request: InferenceRequest,
        *,
        server: InferenceServer,
        outbox: ResponseDispatcher,
        receive: Receive,
    ) -> None:
        """Submit the request; raises what `InferenceServer.submit` raises."""
        super().__init__(request, server=server, outbox=outbox)
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(_PATIENCE_S, self._start_watch)

    def _start_watch(self) -> None:
        self._watch = asyncio.ensure_future(self._cancel_if_left())

    async def _cancel_if_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.inference.cancel()
        self.responses.abandon(ClientLeft())

    def close(self) -> None:
        """Stop the inference if it still runs."""
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        super().close()


class Answer:
    """A whole answer, as an ASGI application: two messages and nothing else, as `infer` sends many."""

    __slots__ = ("_body", "_headers", "status_code")

    def __init__(
        self,
        body: bytes = b"",
        *,
        status_code: int = 200,
        content_type: bytes = _JSON,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        length = str(len(body)).encode()
        self.status_code = status_code
        self._headers = [(b"content-type", content_type), (b"content-length", length), *headers]
        self._body = body

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send it; the ASGI protocol."""
        await self.send(send)

    async def send(self, send: Send, *headers: tuple[bytes, bytes]) -> None:
        """Send it, with more headers."""
        lines = [*self._headers, *headers]
        await send({"type": "http.response.start", "status": self.status_code, "headers": lines})
        await send({"type": "http.response.body", "body": self._body})


def json_answer(document: Any, *, status_code: int = 200) -> Answer:
    """Answer with JSON."""
    return Answer(orjson.dumps(document), status_code=status_code)


def message_answer(message: str, *, status_code: int) -> Answer:
    """Answer with an error that is HTTP's own."""
    return json_answer({"error": message}, status_code=status_code)


def error_answer(error: GenserveError, *, headers: Sequence[tuple[bytes, bytes]] = ()) -> Answer:
    """Answer with an error, and the status of its code; the log is told.

    The queue of a generation model is ours, and full with 429; Triton's own, of any other model, with 503.
    """
    fail_request(error)
    status_code = _HTTP_STATUS.get(status_of(error), 400)
    if isinstance(error, Overloaded):
        status_code, headers = 429, [*headers, *retry_lines(error)]
    return Answer(orjson.dumps(error_json(error)), status_code=status_code, headers=headers)


def retry_lines(error: Overloaded) -> list[tuple[bytes, bytes]]:
    """Return the headers of a refusal."""
    return [(name.encode(), value.encode()) for name, value in retry_headers(error.retry_after_s).items()]


def refusal_answer(error: GenserveError) -> Answer:
    """Answer with what a request is refused with by its headers."""
    fail_request(error)
    challenge = [(b"www-authenticate", b"Bearer")] if isinstance(error, Unauthenticated) else []
    return Answer(orjson.dumps(error_json(error)), status_code=http_status(error), headers=challenge)


def error_json(error: GenserveError) -> dict[str, str]:
    """Return an error as the protocol tells it, with the remedy beside."""
    error = redacted_error(error)
    return {"error": text_of(error), **({"remedy": error.remedy} if error.remedy else {})}


def too_large(size: int, *, limit: int) -> InferenceError:
    """Return the error of a JSON text that is too long."""
    return InferenceError(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. "
        "Use --http-max-input-size to increase the limit."
    )
