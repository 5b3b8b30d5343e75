"""Conversation: sends the requests of exchanges over real sockets, and tells what came back."""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import grpc
from google.protobuf import json_format, message_factory
from tritonclient.grpc import service_pb2

from tests.conformance.triton.exchange import Step, canonical
from tests.conformance.triton.normal import normalised

__all__ = ["Addresses", "Conversation"]

_TIMEOUT_S = 30
_HEADERS_THAT_MATTER = ("content-type", "content-encoding", "accept-encoding")
_SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_LENGTH_OF_JSON = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a server listens: host:port of each protocol."""

    http: str
    grpc: str
    metrics: str


class Conversation:
    """`with Conversation(addresses) as conversation: answers = conversation.hold(steps)`."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._channel = grpc.insecure_channel(addresses.grpc)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def hold(self, steps: tuple[Step, ...]) -> list[dict[str, Any]]:
        """The answers to all steps, in their order; those of a concurrent group are sent together."""
        answers: list[dict[str, Any]] = []
        for concurrent, group in groupby(steps, key=lambda step: step.concurrent):
            answer = self._together if concurrent else self._in_turn
            answers += answer(list(group))
        return answers

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The normalised answer to one request."""
        protocols = {
            "http": self._http,
            "metrics": self._metrics,
            "grpc": self._grpc,
            "grpc_stream": self._grpc_stream,
        }
        answer = normalised(protocols[request["protocol"]](request))
        return _with_only(request["only"], answer) if "only" in request else answer

    def _together(self, steps: list[Step]) -> list[dict[str, Any]]:
        began = time.monotonic()

        def late(step: Step) -> dict[str, Any]:
            # The order of arrival is what is tested, and only time orders independent connections.
            time.sleep(max(0.0, began + step.after_ms / 1000 - time.monotonic()))
            return self.ask(step.request)

        with ThreadPoolExecutor(len(steps)) as pool:
            return list(pool.map(late, steps))

    def _in_turn(self, steps: list[Step]) -> list[dict[str, Any]]:
        return [self._one(step) for step in steps]

    def _one(self, step: Step) -> dict[str, Any]:
        if not step.settle:
            return self.ask(step.request)
        if step.expect is None:
            return last_of_settled(lambda: self.ask(step.request))
        return first_equal(lambda: self.ask(step.request), step.expect)

    def _http(self, request: dict[str, Any]) -> dict[str, Any]:
        body, headers = _http_body(request)
        return self._http_exchange(self._addresses.http, request["verb"], request["path"], body, headers)

    def _metrics(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._http_exchange(self._addresses.metrics, "GET", request["path"], None, {})

    def _http_exchange(
        self, address: str, verb: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> dict[str, Any]:
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        try:
            connection.request(verb, path, body, headers)
            response = connection.getresponse()
            return _http_answer(response, response.read())
        finally:
            connection.close()

    def _grpc(self, request: dict[str, Any]) -> dict[str, Any]:
        call, message = self._grpc_call(request["method"], request["message"])
        metadata = list(request.get("metadata", {}).items())
        try:
            answer = call(message, timeout=_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            return _grpc_error(error)
        if isinstance(answer, bytes):
            return {"base64": base64.b64encode(answer).decode()}
        return {"message": _to_json(answer)}

    def _grpc_call(self, method: str, message: Any) -> tuple[Any, Any]:
        if "/" in method:
            return self._channel.unary_unary(method), base64.b64decode(message)
        request = json_format.ParseDict(message, _message_class(method, "input_type")())
        return self._channel.unary_unary(*_codecs(method)), request

    def _grpc_stream(self, request: dict[str, Any]) -> dict[str, Any]:
        call = self._channel.stream_stream(*_codecs("ModelStreamInfer"))
        messages = [
            json_format.ParseDict(message, service_pb2.ModelInferRequest()) for message in request["messages"]
        ]
        responses: list[dict[str, Any]] = []
        metadata = list(request.get("metadata", {}).items())
        try:
            for response in call(iter(messages), timeout=_TIMEOUT_S, metadata=metadata):
                responses.append(_to_json(response))
        except grpc.RpcError as error:
            return {"responses": responses, **_grpc_error(error)}
        return {"responses": responses}


def last_of_settled(ask: Callable[[], Any], *, still_s: float = 0.6) -> Any:
    """The answer that stayed the same for a while, with no model on its way; for recording."""
    answer = None
    while canonical(again := ask()) != canonical(answer) or "LOADING" in canonical(again):
        answer = again
        time.sleep(still_s)
    return again


def first_equal(ask: Callable[[], Any], expected: Any, *, limit_s: float = 5.0) -> Any:
    """The answer as soon as it is the expected one, or the last of some seconds."""
    end = time.monotonic() + limit_s
    while True:
        answer = ask()
        if canonical(answer) == canonical(expected) or time.monotonic() > end:
            return answer
        time.sleep(0.02)


def _with_only(models: list[str], answer: dict[str, Any]) -> dict[str, Any]:
    """The index with the entries of some models."""
    if "message" in answer:
        return {
            "message": {"models": [each for each in answer["message"]["models"] if each["name"] in models]}
        }
    return answer | {"json": [each for each in answer["json"] if each["name"] in models]}


def _http_body(request: dict[str, Any]) -> tuple[bytes | None, dict[str, str]]:
    headers = dict(request.get("headers", {}))
    if "text" in request:
        return request["text"].encode(), headers
    binary = base64.b64decode(request.get("base64", ""))
    if "json" not in request:
        return (binary if "base64" in request else None), headers
    head = json.dumps(request["json"]).encode()
    if binary:
        headers.setdefault(_LENGTH_OF_JSON, str(len(head)))
    return head + binary, headers


def _http_answer(response: http.client.HTTPResponse, body: bytes) -> dict[str, Any]:
    headers = {name: response.headers[name] for name in _HEADERS_THAT_MATTER if name in response.headers}
    answer: dict[str, Any] = {"status": response.status, "headers": headers}
    if length := int(response.headers.get(_LENGTH_OF_JSON, 0)):
        binary = base64.b64encode(body[length:]).decode()
        return answer | {"json": json.loads(body[:length]), "base64": binary}
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return answer | {"events": list(_events(body.decode()))}
    return answer | _decoded(body)


def _decoded(body: bytes) -> dict[str, Any]:
    """The most readable of the three forms of a body that fits; nothing for an empty body."""
    if not body:
        return {}
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body).decode()}
    try:
        return {"json": json.loads(text)}
    except json.JSONDecodeError:
        return {"text": text}


def _events(text: str) -> Iterator[Any]:
    for event in filter(None, text.split("\n\n")):
        yield json.loads(event.removeprefix("data: "))


def _codecs(method: str) -> tuple[str, Any, Any]:
    return (
        f"/{_SERVICE.full_name}/{method}",
        _message_class(method, "input_type").SerializeToString,
        _message_class(method, "output_type").FromString,
    )


def _message_class(method: str, side: str) -> Any:
    return message_factory.GetMessageClass(getattr(_SERVICE.methods_by_name[method], side))


def _to_json(message: Any) -> dict[str, Any]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _grpc_error(error: Any) -> dict[str, Any]:
    return {"code": error.code().name, "details": error.details()}
