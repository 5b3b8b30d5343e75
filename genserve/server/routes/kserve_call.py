"""KServe call: one HTTP request of the KServe protocol, and the answers that all of its routes give."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope

from genserve.errors import GenserveError, InferenceError, Status
from genserve.inference import Inference, InferenceRequest, Parameter
from genserve.kserve.json_document import read_json
from genserve.kserve.outbox import Responses
from genserve.kserve.status import status_of
from genserve.server.services import Services
from genserve.server.sse import ClientLeft

__all__ = [
    "Call",
    "RunningInference",
    "empty_response",
    "error_json",
    "error_response",
    "json_response",
    "message_response",
    "too_large",
]

_HTTP_STATUS: Mapping[Status, int] = {
    Status.NOT_FOUND: 404,
    Status.UNAVAILABLE: 503,
    Status.UNSUPPORTED: 501,
    Status.INTERNAL: 500,
}  # all others: 400
_JSON = "application/json"
_MAX_BODY_BYTES = 2**31 - 1
# So long an answer may take before the socket is watched for the client's leaving: a task for each of
# many short requests would cost more than those that are left early.
_PATIENCE_S = 0.01


class Call:
    """A request.

    Attributes:
        services: of the server.
        names: what the path says: model, version, region, repository; "" where it does not.
    """

    __slots__ = ("_receive", "_scope", "names", "services")

    def __init__(
        self, services: Services, *, scope: Scope, receive: Receive, names: Mapping[str, str]
    ) -> None:
        self.services = services
        self.names = names
        self._scope = scope
        self._receive = receive

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.names["model"]

    @property
    def version(self) -> int:
        """The version that is asked for; -1: the latest."""
        return int(self.names["version"] or -1)

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

    async def body(self, *, limit: int = _MAX_BODY_BYTES, offset: int = 0) -> memoryview:
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
        return memoryview(bytearray().join(chunks))[padding:]

    async def json(self) -> Any:
        """Return the parsed body; None: it is empty. Raises InferenceError."""
        body = await self.body(limit=self.services.settings.http_max_input_size)
        return read_json(body) if body else None

    def start(self, request: InferenceRequest) -> RunningInference:
        """Submit a request to its model; raises what `Door.submit` raises."""
        if self.services.draining:
            text = "Server is stopping, new inference requests are not accepted"
            raise InferenceError(text, status=Status.UNAVAILABLE, remedy="try again on another server")
        responses = self.services.kserve_outbox().open()
        inference = Inference(request=request, on_response=responses.on_response)
        self.services.repository.submit(inference)
        return RunningInference(inference, responses=responses, receive=self._receive)


class RunningInference:
    """An inference that runs for a client: it is cancelled once nobody waits for it.

    Use it as a context manager: leaving it early cancels it too.
    """

    __slots__ = ("_receive", "_timer", "_watch", "inference", "responses")

    def __init__(self, inference: Inference, *, responses: Responses, receive: Receive) -> None:
        self.inference = inference
        self.responses = responses
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
        if not self.inference.ended:
            self.inference.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def json_response(document: Any, *, status_code: int = 200) -> Response:
    """Answer with JSON."""
    return Response(orjson.dumps(document), status_code=status_code, headers={"content-type": _JSON})


def empty_response(*, status_code: int = 200, content_type: str = _JSON) -> Response:
    """Answer with nothing but a status."""
    return Response(status_code=status_code, headers={"content-type": content_type})


def message_response(message: str, *, status_code: int) -> Response:
    """Answer with an error that is HTTP's own."""
    return json_response({"error": message}, status_code=status_code)


def error_response(error: GenserveError, *, status_code: int | None = None) -> Response:
    """Answer with an error; `status_code` where Triton has another than its code's."""
    return json_response(
        error_json(error), status_code=status_code or _HTTP_STATUS.get(status_of(error), 400)
    )


def error_json(error: GenserveError) -> dict[str, str]:
    """Return an error as the protocol tells it, with the remedy beside."""
    return {"error": error.message, **({"remedy": error.remedy} if error.remedy else {})}


def too_large(size: int, *, limit: int) -> InferenceError:
    """Return the error of a JSON text that is too long."""
    return InferenceError(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. "
        "Use --http-max-input-size to increase the limit."
    )
