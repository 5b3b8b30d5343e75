"""Endpoint: the gRPC port of a server, from open to closed."""

from __future__ import annotations

from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from genserve.errors import GenserveError
from genserve.log import LoggedRequest, quoted
from genserve.server.address import address_of
from genserve.server.grpc.administration import log_call
from genserve.server.grpc.health import Health
from genserve.server.grpc.key_check import KeyCheck, RestrictionCheck
from genserve.server.grpc.service import Service
from genserve.server.restrictions import parse_restrictions
from genserve.server.services import Services
from genserve.server.tls import grpc_credentials

__all__ = ["GrpcEndpoint"]

_OPTIONS = (
    ("grpc.max_receive_message_length", 2**31 - 1),
    ("grpc.max_send_message_length", 2**31 - 1),
)


class _Unknown(grpc.GenericRpcHandler):  # type: ignore[misc]  # untyped
    """Answers calls of methods that there are not as the library does, and logs them."""

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a method."""

        async def refuse(request: Any, context: Any) -> None:
            code, method = grpc.StatusCode.UNIMPLEMENTED, quoted(handler_call_details.method)
            log_call(LoggedRequest(id=""), code, context=context, method=method)
            await context.abort(code, "Method not found!")

        return grpc.stream_stream_rpc_method_handler(refuse)


class GrpcEndpoint:
    """The services on one port. Construct, open and close it on the event loop."""

    def __init__(self, services: Services) -> None:
        self._settings = settings = services.settings
        interceptors: list[Any] = [KeyCheck(settings.api_key)] if settings.api_key else []
        prefix = "triton-grpc-protocol-"
        if restrictions := parse_restrictions(settings.grpc_restricted_protocol, prefix=prefix):
            interceptors.append(RestrictionCheck(restrictions))
        self._server: Any = grpc.aio.server(
            options=(
                *_OPTIONS,
                ("grpc.so_reuseport", int(settings.reuse_grpc_port)),   # 0: a port that is taken is an error
                *settings.grpc_channel_arguments,
            ),
            interceptors=interceptors,
        )
        service = Service(services)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, self._server)
        self._server.add_generic_rpc_handlers((Health(services).handler,))
        self._server.add_generic_rpc_handlers((_Unknown(),))     # asked after the others

    async def open(self, *, host: str, port: int) -> int:
        """Listen; return the port, which is a free one for port 0.

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
        credentials = grpc_credentials(self._settings)
        if credentials is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, credentials)

    async def close(self, *, drain_s: float) -> None:
        """Accept no more calls, let those that run end for a while, then cancel them."""
        await self._server.stop(drain_s)
