"""Call server: a replica's side of the connections of the ingresses."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import ssl
from contextlib import aclosing
from functools import partial

from genserve.deploy.calls.call_protocol import (
    SECRET_BYTES,
    SECRET_S,
    Call,
    CallEnded,
    CallItem,
    CallPort,
    EndCall,
    MessageProtocol,
    Stopping,
    tls_of_cluster,
)
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.errors import SEE_LOG, Closed, GenserveError, ModelFailed

logger = logging.getLogger(__name__)


class CallServer:
    """Takes calls of a replica on a port of its own. For one event loop."""

    def __init__(self, replica: ModelReplica) -> None:
        """Answer calls by a replica."""
        self.replica = replica
        self.stopping = False
        self.connections: set[_Connection] = set()
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> CallPort:
        """Listen on a free port of an address of this machine."""
        event_loop = asyncio.get_running_loop()
        tls = tls_of_cluster(ssl.Purpose.CLIENT_AUTH)
        self._server = await event_loop.create_server(partial(_Connection, self), host, 0, ssl=tls)
        port: int = self._server.sockets[0].getsockname()[1]
        return CallPort(replica=self.replica.id, host=host, port=port, secret=self.secret)

    async def stop(self) -> None:
        """Take no more calls, and return when those that run have ended."""
        if self._server is None:
            return
        self.stopping = True
        self._server.close()
        for connection in self.connections:
            connection.send(Stopping())
        while running := [task for one in self.connections for task in one.calls.values()]:
            await asyncio.wait(running)

    def close(self) -> None:
        """Close the connections. A second call does nothing."""
        for connection in tuple(self.connections):
            connection.close()


class _Connection(MessageProtocol):
    """The connection of one ingress."""

    def __init__(self, server: CallServer) -> None:
        super().__init__()
        self.calls: dict[int, asyncio.Task[None]] = {}
        self._server = server
        self._secret = bytearray()      # as far as it has been received
        self._timer = self._event_loop.call_later(SECRET_S, self.close)

    def data_received(self, data: bytes) -> None:
        """Take the secret, and then messages."""
        if self._transport.is_closing():    # a transport may hand over what has arrived meanwhile
            return
        missing = SECRET_BYTES - len(self._secret)
        if missing:
            self._secret += data[:missing]
            if len(self._secret) < SECRET_BYTES:
                return
            if not hmac.compare_digest(self._secret, self._server.secret):
                logger.warning("a connection to the replica does not know its secret, and is closed")
                self.close()
                return
            self._timer.cancel()
            self._server.connections.add(self)
            self.check()
            data = data[missing:]
        super().data_received(data)

    def message_received(self, message: Call | EndCall | None) -> None:
        """Begin or end a call."""
        if isinstance(message, Call):
            task = self._event_loop.create_task(self._answer(message))
            self.calls[message.number] = task
            task.add_done_callback(lambda _: self.calls.pop(message.number))
        elif isinstance(message, EndCall) and message.number in self.calls:
            self.calls[message.number].cancel()

    async def _answer(self, call: Call) -> None:
        error: GenserveError | None = None
        try:
            await self._send_items(call)
        except GenserveError as failure:
            error = _of_genserve(failure)
        except asyncio.CancelledError:  # by the ingress, unless something in the replica was
            error = Closed("the replica was stopped before the answer was complete")
        except Exception:
            logger.exception("a call of '%s' failed", call.method)
            error = ModelFailed("the call of a replica failed", remedy=SEE_LOG)
        self.send(CallEnded(call.number, error))

    async def _send_items(self, call: Call) -> None:
        if self._server.stopping:
            raise Closed("the replica is stopping", remedy="try again: another replica answers")
        replica = self._server.replica
        items = replica.generate(call.argument) if call.method == "generate" else replica.infer(call.argument)
        async with aclosing(items):     # type: ignore[type-var]
            async for item in items:
                self.send(CallItem(call.number, item))
                await self.writable()

    def connection_lost(self, error: Exception | None) -> None:
        """End the calls, for which nobody waits any more."""
        super().connection_lost(error)
        self._timer.cancel()
        self._server.connections.discard(self)
        for task in self.calls.values():
            task.cancel()

    def close(self) -> None:
        """Close it, and with it its calls."""
        self._transport.close()


def _of_genserve(error: GenserveError) -> GenserveError:
    """Return an error without classes of a model's code, which the ingress could not unpickle."""
    kind = next(one for one in type(error).__mro__ if _is_known(one))
    if kind is type(error):
        return error
    assert issubclass(kind, GenserveError)
    known = kind.__new__(kind, error.message)
    known.__dict__.update({name: value for name, value in vars(error).items() if _is_known(type(value))})
    return known


def _is_known(kind: type) -> bool:
    return kind.__module__ == "builtins" or kind.__module__.startswith("genserve.")
