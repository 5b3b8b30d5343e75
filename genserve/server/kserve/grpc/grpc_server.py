"""gRPC server: the port, its key and restrictions, and the standard services for health and reflection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from tritonclient.grpc import service_pb2

from genserve.errors import Forbidden, GenserveError
from genserve.log import quoted
from genserve.request_context import NO_KEY, RequestContext
from genserve.server.access.access_control import Restrictions, address_of, credentials, parse_restrictions
from genserve.server.access.key_ring import CURRENT_KEY, KeyRing
from genserve.server.access.tls import TlsFiles
from genserve.server.kserve.grpc.inference_service import InferenceService
from genserve.server.kserve.grpc.rpc_method import abort, inference_handlers, log_call, rights_of, status_code
from genserve.server.kserve.state import KServeState
from genserve.server.services import Services
from genserve.settings import grpc_channel_arguments

_WATCH_INTERVAL_S = 0.5
_OPTIONS = (
    ("grpc.max_receive_message_length", 2**31 - 1),
    ("grpc.max_send_message_length", 2**31 - 1),
    # Calls on one connection; a client's library queues more. Beyond some thousand calls that wait to be
    # accepted, of all connections together, gRPC cancels new ones, whoever sends them.
    ("grpc.max_concurrent_streams", 1000),
)


def _is_not_of_a_client_that_left(record: logging.LogRecord) -> bool:
    """Whether to keep a record of the library, which logs a traceback for each client that left meanwhile."""
    return record.exc_info is None or type(record.exc_info[1]).__name__ != "ExecuteBatchError"


class GrpcServer:
    """The gRPC services on one port. Construct, open and close it on the event loop."""

    def __init__(self, services: Services, state: KServeState, *, tls: TlsFiles | None = None) -> None:
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_not_of_a_client_that_left)
        self._tls = tls
        settings = services.settings
        keys = services.keys
        interceptors: list[Any] = [ApiKeyInterceptor(keys)] if keys.has_keys else []
        prefix = "triton-grpc-protocol-"
        if restrictions := parse_restrictions(settings.grpc_restricted_protocol, prefix=prefix):
            interceptors.append(RestrictionInterceptor(restrictions))
        self._server: Any = grpc.aio.server(
            options=(
                *_OPTIONS,
                ("grpc.so_reuseport", int(settings.reuse_grpc_port)),   # 0: fail if the port is taken
                *grpc_channel_arguments(settings),
            ),
            interceptors=interceptors,
        )
        service = InferenceService(services, state)
        handlers = (inference_handlers(service), Health(services).handler, *_reflection_handlers())
        self._server.add_generic_rpc_handlers(handlers)
        self._server.add_generic_rpc_handlers((_UnknownMethods(),))     # tried after the others

    async def open(self, *, host: str, port: int) -> int:
        """Listen; return the port, a free one for port 0.

        Raises:
            GenserveError: the port is taken, or the address is not of this machine.
        """
        address = address_of(host, port)
        try:
            bound: int = self._add_port(address)
        except RuntimeError as error:
            raise GenserveError(
                f"cannot listen on {address} for gRPC: it is in use, or not an address of this machine",
                remedy="choose another port with --grpc-port; 0 takes a free one, --allow-grpc=false none",
            ) from error
        await self._server.start()
        return bound

    def _add_port(self, address: str) -> Any:
        if self._tls is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, self._tls.grpc_credentials())

    async def close(self, *, drain_s: float) -> None:
        """Accept no more calls, let running ones finish for `drain_s`, then cancel them."""
        await self._server.stop(drain_s)


def _reflection_handlers() -> list[Any]:
    """Return the handlers that describe the services, so that grpcurl and others need no .proto files."""
    [inference] = service_pb2.DESCRIPTOR.services_by_name.values()
    known = (inference.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    method = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(known).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    # grpcio-reflection has only the older name; the messages are the same.
    return [
        grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
        for name in ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)
    ]


class _UnknownMethods(grpc.GenericRpcHandler):  # type: ignore[misc]  # untyped
    """Rejects calls of unknown methods as the library does, and logs them."""

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a method."""

        async def reject(request: Any, context: Any) -> None:
            code, method = grpc.StatusCode.UNIMPLEMENTED, quoted(handler_call_details.method)
            log_call(RequestContext(id="", client=context.peer()), code, method=method)
            await context.abort(code, "Method not found!")

        return grpc.stream_stream_rpc_method_handler(reject)


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # untyped
    """Requires the metadata `authorization: Bearer KEY` or `x-api-key: KEY`."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        """Pass a call on, or reject it as UNAUTHENTICATED."""
        handler = await continuation(call)
        given = dict(call.invocation_metadata or ())
        key = self._keys.find(credentials(_bytes(given.get("authorization")), _bytes(given.get("x-api-key"))))
        CURRENT_KEY.set(key)        # for the method, which runs in the same task
        rights = rights_of(call.method)
        if handler is None or rights.is_open:
            return handler
        try:
            self._keys.check(key, controls=rights.controls)
        except GenserveError as error:
            return _rejecting(call.method, error)
        return handler


def _bytes(given: str | bytes | None) -> bytes | None:
    return given.encode() if isinstance(given, str) else given


class RestrictionInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # untyped
    """Requires the metadata of `--grpc-restricted-protocol`, as Triton does."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        """Pass a call on, or reject it as UNAVAILABLE."""
        handler = await continuation(call)
        restriction = self._restrictions.get(rights_of(call.method).part or "")
        if handler is None or restriction is None:
            return handler
        if restriction.is_met_by(dict(call.invocation_metadata or ()).get(restriction.header)):
            return handler
        text = f"This protocol is restricted, expecting header '{restriction.header}'"
        return _rejecting(call.method, Forbidden(text))


def _rejecting(method: str, error: GenserveError) -> Any:
    """Return a handler that logs every call of a method and ends it with an error."""

    async def reject(requests: Any, context: Any) -> None:
        name, key = method.rpartition("/")[2], CURRENT_KEY.get()
        logged = RequestContext(
            id="",
            client=context.peer(),
            key=key.share if key else NO_KEY,
            controls=rights_of(method).controls,
            error=error,
        )
        log_call(logged, status_code(error), method=quoted(name))
        await abort(context, error)

    # A stream handler, as it reads no request, which may have gigabytes.
    return grpc.stream_stream_rpc_method_handler(reject)


class Health:
    """Reports whether the server is ready; as in Triton, for any service name.

    The requests are never read: these calls need no key, and a message may have gigabytes.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._status: Any = None        # that watchers saw last
        self._next_update_s = 0.0       # time of the event loop

    @property
    def handler(self) -> Any:
        """The handler for a gRPC server."""
        write = health_pb2.HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            health.SERVICE_NAME,
            {
                # Stream handlers, as they read no request; clients see no difference.
                "Check": grpc.stream_stream_rpc_method_handler(self._check, response_serializer=write),
                "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=write),
            },
        )

    async def _check(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        """Yield SERVING, or NOT_SERVING while a model loads, after it failed, or while the server drains."""
        yield health_pb2.HealthCheckResponse(status=await self._current())

    async def _watch(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        """Yield the status, and again after each change, until the server drains."""
        last = None
        while True:
            await self._update()
            if self._status != last:
                last = self._status
                yield health_pb2.HealthCheckResponse(status=last)
            if self._services.draining:
                return
            await asyncio.sleep(_WATCH_INTERVAL_S)

    async def _update(self) -> None:
        """Update the status, once for all watchers."""
        now = asyncio.get_running_loop().time()
        if self._status is None or now >= self._next_update_s or self._services.draining:
            self._next_update_s = now + _WATCH_INTERVAL_S
            self._status = await self._current()

    async def _current(self) -> Any:
        statuses = health_pb2.HealthCheckResponse
        return statuses.SERVING if await self._services.is_ready() else statuses.NOT_SERVING
