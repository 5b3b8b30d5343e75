"""Call server: a replica's side of the connections of the ingresses."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

from genserve.deploy.calls.call_protocol import (
    HANDSHAKE_S,
    SECRET_BYTES,
    WINDOW_BYTES,
    CallPort,
    Frame,
    HandshakeFailed,
    MessageProtocol,
    check_hello,
    check_proof,
    new_hello,
    proof,
    tls_of_cluster,
)
from genserve.deploy.calls.message_codec import UnreadableMessage, decoded
from genserve.deploy.replica.model_replica import ModelReplica
from genserve.deploy.replica_messages import plain_error
from genserve.errors import SEE_LOG, Closed, GenserveError, ModelFailed

logger = logging.getLogger(__name__)

# A replica that stops still takes calls until none has come for some seconds: an ingress may need a moment
# until it knows another replica, and has loaded the tokenizer of another version. Then the replica rejects
# calls.
_QUIET_S = 3.0
_HANDOVER_S = 10.0
_LOOK_S = 0.05


class CallServer:
    """Takes calls of a replica on a port of its own. For one event loop."""

    def __init__(self, replica: ModelReplica) -> None:
        """Answer calls by a replica."""
        self.replica = replica
        self.stopping = self.rejecting = False
        self.last_call_s = 0.0  # when one came, by the event loop
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
        """Leave new calls to other replicas, and return when the running calls have ended."""
        if self._server is None:
            return
        self.stopping = True
        self._server.close()
        for connection in self.connections:
            connection.send(Frame.STOPPING)
        event_loop = asyncio.get_running_loop()
        self.last_call_s = event_loop.time()
        end_s = self.last_call_s + _HANDOVER_S
        while self.connections and event_loop.time() < min(  # noqa: ASYNC110  # each call moves the end
            end_s, self.last_call_s + _QUIET_S
        ):
            await asyncio.sleep(_LOOK_S)
        self.rejecting = True
        while running := [task for one in self.connections for task in one.tasks]:
            await asyncio.wait(running)

    def close(self) -> None:
        """Close the connections. A second call does nothing."""
        for connection in tuple(self.connections):
            connection.close()


class _Connection(MessageProtocol):
    """The connection of one ingress."""

    def __init__(self, server: CallServer) -> None:
        super().__init__()
        self._server = server
        self._calls: dict[int, _RunningCall] = {}
        self._hello, self._hello_of_ingress = new_hello(), b""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of the calls that have not ended."""
        return [call.task for call in self._calls.values()]

    def handshake_received(self, kind: Frame, content: bytes) -> None:
        """Answer the hello of an ingress by a hello and a proof, and then check the proof of the ingress."""
        if kind is Frame.HELLO:
            self._hello_of_ingress = content
            self.send(Frame.HELLO, content=self._hello)
            check_hello(content)
            self.send(Frame.PROOF, content=proof(self._server.secret, "replica", hellos=self._hellos))
            return
        check_proof(content, self._server.secret, "ingress", hellos=self._hellos)
        assert self._timer is not None
        self._timer.cancel()
        self._server.connections.add(self)
        self.trust()
        if self._server.stopping:
            self.send(Frame.STOPPING)

    @property
    def _hellos(self) -> tuple[bytes, bytes]:
        return self._hello_of_ingress, self._hello

    def failed(self, error: HandshakeFailed) -> None:
        """Log why the connection is closed."""
        logger.warning("a connection to the replica is closed: %s", error)

    def frame_received(self, kind: Frame, number: int, content: bytearray) -> None:
        """Begin or end a call, or record how much of it has been read."""
        if kind is Frame.CALL:
            call = _RunningCall()
            self._calls[number] = call
            call.task = self._event_loop.create_task(self._answer(number, content, call))
            call.task.add_done_callback(lambda _: self._calls.pop(number))
        elif (running := self._calls.get(number)) is not None:
            if kind is Frame.END_CALL:
                running.task.cancel()
            elif kind is Frame.READ:
                running.read(int.from_bytes(content))

    async def _answer(self, number: int, content: bytearray, call: _RunningCall) -> None:
        error: GenserveError | None = None
        try:
            method, argument = decoded(content)
            await self._send_items(number, method, argument, call)
        except GenserveError as failure:
            error = plain_error(failure)
        except asyncio.CancelledError:  # by the ingress, unless something in the replica was
            error = Closed("the replica was stopped before the answer was complete")
        except UnreadableMessage as unreadable:
            logger.error("a call cannot be read: %s", unreadable)   # noqa: TRY400
            error = ModelFailed("a replica cannot read the call of the ingress", remedy=SEE_LOG)
        except Exception:
            logger.exception("a call of the ingress failed")
            error = ModelFailed("the call of a replica failed", remedy=SEE_LOG)
        await self.send_message(Frame.ENDED, number, error)

    async def _send_items(
        self, number: int, method: Literal["generate", "infer"], argument: Any, call: _RunningCall
    ) -> None:
        self._server.last_call_s = self._event_loop.time()
        if self._server.rejecting:
            raise Closed("the replica is stopping", remedy="try again: another replica answers")
        replica = self._server.replica
        items = replica.generate(argument) if method == "generate" else replica.infer(argument)
        async with aclosing(items):     # type: ignore[type-var]
            async for item in items:
                if not call.has_room.is_set():
                    await call.has_room.wait()
                call.sent(await self.send_message(Frame.ITEM, number, item))

    def connection_made(self, transport: asyncio.Transport) -> None:    # type: ignore[override]
        """Begin; with TLS, after its handshake."""
        super().connection_made(transport)
        self._timer = self._event_loop.call_later(HANDSHAKE_S, self.close)

    def connection_lost(self, error: Exception | None) -> None:
        """End the calls, for which nobody waits any more."""
        super().connection_lost(error)
        if self._timer is not None:
            self._timer.cancel()
        self._server.connections.discard(self)
        for task in self.tasks:
            task.cancel()


class _RunningCall:
    """A call that has not ended.

    Attributes:
        task: the task that answers the call.
        has_room: an event that is set while the ingress has less than a window to read.
    """

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.has_room = asyncio.Event()
        self.has_room.set()
        self._num_unread = 0

    def sent(self, num_bytes: int) -> None:
        self._num_unread += num_bytes
        if self._num_unread >= WINDOW_BYTES:
            self.has_room.clear()

    def read(self, num_bytes: int) -> None:
        self._num_unread -= num_bytes
        if self._num_unread < WINDOW_BYTES:
            self.has_room.set()
