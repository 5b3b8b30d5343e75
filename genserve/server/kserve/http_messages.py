"""KServe HTTP: one HTTP request of the KServe protocol, and the responses that all of its routes give."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from genserve.errors import GenserveError, InferenceError, Status
from genserve.inference import InferenceRequest, InferenceServer, Parameter
from genserve.request_context import current_request
from genserve.server.error_formats import error_headers, kserve_error
from genserve.server.error_statuses import kserve_status
from genserve.server.http.connection_errors import raise_connection_error
from genserve.server.http.offload import offload_if_large
from genserve.server.http.request_body import check_content_encoding
from genserve.server.http.sse_response import ClientLeft
from genserve.server.kserve.running_inference import ResponseDispatcher, RunningInference
from genserve.server.kserve.state import KServeState
from genserve.server.kserve.triton_parsing import forwarded_headers, read_json, read_version
from genserve.server.services import Services
from genserve.tracing import Trace

_JSON = b"application/json"
# Delay before the socket of a request is watched for a disconnect: a task for each of many short requests
# would cost more than running those whose client has left.
_WATCH_DELAY_S = 0.01


class KServeCall:
    """A request.

    Attributes:
        services: the services of the server.
        state: the state of the protocol.
        names: the parts of the path: model, version, region, repository; "" where it has none.
        trace: the request's trace; None: it is not traced.
    """

    __slots__ = ("_receive", "_scope", "names", "services", "state", "trace")

    def __init__(
        self,
        services: Services,
        state: KServeState,
        *,
        scope: Scope,
        receive: Receive,
        names: Mapping[str, str],
    ) -> None:
        self.services = services
        self.state = state
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
        """The version that is requested; -1: the latest. Raises InferenceError."""
        return read_version(self.names.get("version", ""))

    def header(self, name: bytes) -> str | None:
        """Return the value of a header, by its name in lower case."""
        for key, value in self._scope["headers"]:
            if key == name:
                text: str = value.decode("latin-1")
                return text
        return None

    def forwarded_headers(self) -> dict[str, Parameter]:
        """Return the headers that become parameters of the request. Raises InferenceError."""
        headers = ((key.decode("latin-1"), value.decode("latin-1")) for key, value in self._scope["headers"])
        return forwarded_headers(headers, self.services.settings.http_header_forward_pattern)

    async def body(self, *, limit: int, offset: int = 0) -> memoryview:
        """Return the body as one writable buffer.

        Args:
            limit: the most bytes that it may have.
            offset: where the byte is that is aligned, so that an array can begin there.

        Raises:
            InferenceError: it is longer than the limit.
            ClientLeft: the connection ended before the body did.
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
            if more := message.get("more_body", False):
                raise_connection_error(self._scope)
                if (declared := int(self.header(b"content-length") or 0)) > limit:
                    raise too_large(declared, limit=limit)
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise too_large(int(self.header(b"content-length") or size), limit=limit)
        if self.trace is not None:
            self.trace.record("HTTP_RECV_END")
        return memoryview(bytearray().join(chunks))[padding:]

    async def plain_body(self) -> memoryview:
        """Return the body of a route that takes no compressed one.

        Raises:
            UnsupportedMediaType: it is compressed.
            InferenceError, ClientLeft: see `body`.
        """
        check_content_encoding(self.header(b"content-encoding") or "identity")
        return await self.body(limit=self.services.settings.http_max_input_size)

    async def json(self) -> Any:
        """Return the parsed body; None: it is empty. Raises what `plain_body` raises, and InferenceError."""
        body = await self.plain_body()
        return await offload_if_large(len(body), read_json, body) if body else None

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
            dispatcher=self.state.dispatcher(),
            receive=self._receive,
        )


class WatchedInference(RunningInference):
    """An inference that is also cancelled when its client closes the connection."""

    __slots__ = ("_receive", "_timer", "_watch")

    def __init__(
        self,
        request: InferenceRequest,
        *,
        server: InferenceServer,
        dispatcher: ResponseDispatcher,
        receive: Receive,
    ) -> None:
        """Submit the request; raises what `InferenceServer.submit` raises."""
        super().__init__(request, server=server, dispatcher=dispatcher)
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(_WATCH_DELAY_S, self._start_watch)

    def _start_watch(self) -> None:
        self._watch = asyncio.ensure_future(self._cancel_on_disconnect())

    async def _cancel_on_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.inference.cancel()
        self.responses.abandon(ClientLeft())

    def close(self) -> None:
        """Cancel the inference if it still runs."""
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        super().close()


class KServeResponse:
    """A whole response, as a light ASGI application: `infer` sends thousands per second."""

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
        """Send it, with additional headers."""
        lines = [*self._headers, *headers]
        await send({"type": "http.response.start", "status": self.status_code, "headers": lines})
        await send({"type": "http.response.body", "body": self._body})


def json_response(document: Any) -> KServeResponse:
    """Return a response with JSON."""
    return KServeResponse(orjson.dumps(document))


def message_response(
    message: str, *, status_code: int, headers: Sequence[tuple[bytes, bytes]] = ()
) -> KServeResponse:
    """Return the response for an error of HTTP, such as a wrong method."""
    return KServeResponse(orjson.dumps({"error": message}), status_code=status_code, headers=headers)


def error_response(error: GenserveError, *, headers: Sequence[tuple[bytes, bytes]] = ()) -> KServeResponse:
    """Return the response for an error, and note the error for the log."""
    current_request().fail(error)
    body = orjson.dumps(kserve_error(error))
    return KServeResponse(body, status_code=kserve_status(error), headers=[*headers, *header_lines(error)])


def header_lines(error: GenserveError) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error."""
    return [(name.encode(), value.encode()) for name, value in error_headers(error).items()]


def too_large(size: int, *, limit: int) -> InferenceError:
    """Return the error for a JSON text that is too long."""
    return InferenceError(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. "
        "Use --http-max-input-size to increase the limit."
    )
