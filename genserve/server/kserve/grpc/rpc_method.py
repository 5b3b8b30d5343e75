"""RPC method: what every method of a gRPC service does with its messages, its errors and its line in the log.

A method also receives bytes that are no message: the library answers those with UNKNOWN, its name of a Python
exception, and a traceback in the log.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import string
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, unquote

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health
from tritonclient.grpc import service_pb2

from genserve.errors import GenserveError, InferenceError, Overloaded
from genserve.redaction import redacted_error
from genserve.request_context import CURRENT_REQUEST, NO_KEY, VERBOSE, RequestContext
from genserve.server.access.access_control import ANY_KEY, PROBE, Rights
from genserve.server.access.key_ring import CURRENT_KEY
from genserve.server.error_statuses import as_genserve_error, grpc_status
from genserve.server.observe.access_log import is_verbose, level_of, log_request
from genserve.server.observe.request_spans import RequestSpan, RequestSpans

logger = logging.getLogger(__name__)

# Trailing metadata of an error.
_REMEDY = "genserve-remedy"
_PUSHBACK = "grpc-retry-pushback-ms"    # gRPC's own, for clients with a retry policy
# Bytes after gRPC has percent-encoded unprintable characters; clients take 8 KiB of trailing metadata.
_MAX_DETAILS = 4096
_MAX_REMEDY = 1024
_UNQUOTED = string.punctuation.replace("%", "") + " "
_Method = TypeVar("_Method", bound=Callable[..., Any])
_Answer: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]

_rights: dict[str, Rights] = {}     # by the name of the method


def requires(rights: Rights) -> Callable[[_Method], _Method]:
    """Declare what clients need to call a method; any key may call a method of another service."""

    def declare(method: _Method) -> _Method:
        _rights[method.__name__] = rights
        return method

    return declare


def rights_of(method: str) -> Rights:
    """Return what clients need to call a method, by its full name: `/SERVICE/ModelInfer`."""
    service, _, name = method.rpartition("/")
    return PROBE if service == f"/{health.SERVICE_NAME}" else _rights.get(name, ANY_KEY)


def rpc_method(
    rights: Rights, *, controls: Callable[[Any], bool] = lambda _request: False
) -> Callable[[_Answer], _Answer]:
    """Decorate a method of a service: its errors become statuses, and its calls are logged.

    Args:
        rights: what clients need to call it.
        controls: whether a request changes the server, although the method need not.
    """

    def decorate(answer: _Answer) -> _Answer:
        handler = _answer_or_abort(answer, lambda request: rights.controls or controls(request))
        return requires(rights)(handler)

    return decorate


def _answer_or_abort(answer: _Answer, controls: Callable[[Any], bool]) -> _Answer:
    @wraps(answer)
    async def answer_or_abort(self: Any, request: Any, context: Any) -> Any:
        if isinstance(request, MalformedMessage):
            await abort_malformed(context, request, method=answer.__name__)
        services = self._services
        logged = begin_request(request, context, client=context.peer(), spans=services.request_spans)
        logged.controls = controls(request)
        services.num_grpc_calls += 1
        try:
            if logged.controls:
                services.keys.check(CURRENT_KEY.get(), controls=True)
            response = await answer(self, request, context)
        except asyncio.CancelledError:
            log_call(logged, grpc.StatusCode.CANCELLED, method=answer.__name__)
            raise
        except Exception as error:
            failed = as_genserve_error(error, doing=answer.__name__)
            logged.fail(failed)
            log_call(logged, status_code(failed), method=answer.__name__)
            await abort(context, failed)
        else:
            log_call(logged, grpc.StatusCode.OK, method=answer.__name__)
            return response
        finally:
            services.num_grpc_calls -= 1
            services.keys.end(logged)
            logged.end_uses()

    return answer_or_abort


async def abort_malformed(context: Any, error: MalformedMessage, *, method: str) -> None:
    """Log a call whose message could not be parsed, and end it."""
    code = status_code(error)
    log_call(RequestContext(id="", client=context.peer(), error=error), code, method=method)
    await abort(context, error)


async def abort(context: Any, error: GenserveError) -> None:
    """End a call with an error; the trailing metadata has its remedy and, if known, when to retry."""
    error = redacted_error(error)
    metadata = []
    if error.remedy:
        remedy = " ".join(error.remedy.split()).encode("ascii", "replace").decode()
        metadata.append((_REMEDY, remedy[:_MAX_REMEDY]))
    if isinstance(error, Overloaded):
        metadata.append((_PUSHBACK, str(math.ceil(error.retry_after_s * 1000))))
    if metadata:
        context.set_trailing_metadata(tuple(metadata))
    await context.abort(status_code(error), _details(error))


def status_code(error: GenserveError) -> grpc.StatusCode:
    """Return the status of an error; see `grpc_status`."""
    return grpc.StatusCode[grpc_status(error)]


def _details(error: GenserveError) -> str:
    """Return the message of an error, truncated to what fits into the headers of HTTP/2."""
    encoded = quote(error.message, safe=_UNQUOTED, errors="replace")
    if len(encoded) > _MAX_DETAILS:
        logger.warning("an error of %d characters is truncated for gRPC: %s", len(error.message), error.code)
        logger.debug("its message: %s", error.message)     # which may quote the request
        encoded = re.sub("%.?$", "", encoded[:_MAX_DETAILS])
    return unquote(encoded, errors="ignore")


def begin_request(message: Any, context: Any, *, client: str, spans: RequestSpans | None) -> RequestContext:
    """Return the record of a request for the log, and make it the current one; see `access_log`.

    `client` is the call's `peer()`, read when the call begins: gRPC crashes the process if it is asked for
    that of a cancelled call.
    """
    names_model = message.DESCRIPTOR.name.startswith("Model")
    model = getattr(message, "model_name", "") or (getattr(message, "name", "") if names_model else "")
    key = CURRENT_KEY.get()
    request = RequestContext(
        id=getattr(message, "id", ""),
        client=client,
        model=model,
        key=key.share if key else NO_KEY,
        levels=VERBOSE,
    )
    if spans is not None:
        request.span = RequestSpan(spans, context.invocation_metadata() or ())
    CURRENT_REQUEST.set(request)
    return request


def log_call(request: RequestContext, code: grpc.StatusCode, *, method: str) -> None:
    """Log a call that has ended; see `log_request`."""
    level = level_of(request, failed=code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED))
    if level > logging.DEBUG or is_verbose():
        client = unquote(request.client).removeprefix("ipv4:").removeprefix("ipv6:")
        log_request(request, client=client, call=f"gRPC {method}", status=code.name, level=level)


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
