"""Message handlers: the methods of the inference service, also for bytes that are no message.

The library answers those with UNKNOWN, its name of a Python exception, and a traceback in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

from genserve.errors import InferenceError


class MalformedMessage(InferenceError):
    """Stands in for a message that could not be parsed; a method raises it."""


def inference_handlers(service: Any) -> Any:
    """Return the generic handler of a service, whose methods may receive a `MalformedMessage`."""
    [described] = service_pb2.DESCRIPTOR.services_by_name.values()
    handlers = {method.name: _handler(method, getattr(service, method.name)) for method in described.methods}
    return grpc.method_handlers_generic_handler(described.full_name, handlers)


def _handler(method: Any, answer: Callable[..., Any]) -> Any:
    make = (
        grpc.stream_stream_rpc_method_handler
        if method.client_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(
        answer,
        request_deserializer=partial(_parse, GetMessageClass(method.input_type)),
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def _parse(message_class: Any, data: bytes) -> Any:
    try:
        return message_class.FromString(data)
    except DecodeError:
        name = message_class.DESCRIPTOR.name
        return MalformedMessage(
            f"failed to parse the request: its {len(data)} bytes are not a {name}",
            remedy="generate the client from this server's grpc_service.proto, or use tritonclient",
        )
