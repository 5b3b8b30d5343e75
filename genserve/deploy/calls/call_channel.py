"""Call channel: an ingress's side of the connection to one replica."""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from genserve.deploy.calls.call_protocol import (
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
from genserve.errors import SEE_LOG, ModelFailed, ReplicaLost

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0


class CallChannel(MessageProtocol):
    """A connection over which calls of one replica run at the same time.

    The replica may announce that it stops: it then takes no more calls, and the running calls go on.

    Attributes:
        is_stopping: whether the replica has announced that it stops.
    """

    def __init__(self, secret: bytes, *, on_end: Callable[[], object]) -> None:
        """Call `on_end` when the replica takes no more calls, or is lost, or both."""
        super().__init__()
        self.is_stopping = False
        self._secret = secret
        self._on_end = on_end
        self._hello, self._hello_of_replica = new_hello(), b""
        self._trusted: asyncio.Future[None] = self._event_loop.create_future()
        self._numbers = itertools.count()
        # The items of each call that have arrived, not unpickled; None: the connection is lost.
        self._calls: dict[int, asyncio.Queue[tuple[Frame, bytearray] | None]] = {}

    @classmethod
    async def open(cls, port: CallPort, *, on_end: Callable[[], object]) -> CallChannel:
        """Connect to a replica.

        Raises:
            OSError: the replica cannot be reached within some seconds.
            HandshakeFailed: the replica runs another version of genserve, or something else listens there.
        """
        async with asyncio.timeout(_CONNECT_S):
            _, channel = await asyncio.get_running_loop().create_connection(
                lambda: cls(port.secret, on_end=on_end),
                port.host,
                port.port,
                ssl=tls_of_cluster(ssl.Purpose.SERVER_AUTH),
            )
            try:
                await channel._trusted
            except BaseException:
                channel.close()
                raise
        return channel

    async def call(self, method: Literal["generate", "infer"], argument: Any) -> AsyncIterator[Any]:
        """Yield the items of a call; closing the iterator ends it at the replica.

        Raises:
            ReplicaLost: the connection is lost.
            ModelFailed: the replica has sent what is no message.
            GenserveError: whatever the replica raised.
        """
        number = next(self._numbers)
        arrived: asyncio.Queue[tuple[Frame, bytearray] | None] = asyncio.Queue()
        if self.is_closing:
            raise _lost()
        self._calls[number] = arrived
        ended = False
        num_read = 0    # bytes that the replica does not know of
        try:
            await self.send_message(Frame.CALL, number, (method, argument))
            while True:
                frame = await arrived.get()
                if frame is None:
                    raise _lost()
                kind, content = frame
                ended = kind is Frame.ENDED
                message = _read(content)
                if ended:
                    if message is not None:
                        raise message
                    return
                yield message
                num_read += len(content)
                if num_read >= WINDOW_BYTES // 2:
                    self.send(Frame.READ, number, num_read.to_bytes(8))
                    num_read = 0
        finally:
            del self._calls[number]
            if not ended:
                self.send(Frame.END_CALL, number)

    def handshake_received(self, kind: Frame, content: bytes) -> None:
        """Check the version of the replica, then whether it is the replica."""
        if kind is Frame.HELLO:
            check_hello(content)
            self._hello_of_replica = content
            return
        hellos = self._hello, self._hello_of_replica
        check_proof(content, self._secret, "replica", hellos=hellos)
        self.send(Frame.PROOF, content=proof(self._secret, "ingress", hellos=hellos))
        self.trust()
        if not self._trusted.done():
            self._trusted.set_result(None)

    def frame_received(self, kind: Frame, number: int, content: bytearray) -> None:
        """Pass an item to the call that it belongs to."""
        if kind is Frame.STOPPING:
            self.is_stopping = True
            self._on_end()
        elif number in self._calls:
            self._calls[number].put_nowait((kind, content))

    def failed(self, error: HandshakeFailed) -> None:
        """Make `open` raise the error."""
        if not self._trusted.done():
            self._trusted.set_exception(error)

    def connection_made(self, transport: asyncio.Transport) -> None:    # type: ignore[override]
        """Begin the handshake."""
        super().connection_made(transport)
        self.send(Frame.HELLO, content=self._hello)

    def connection_lost(self, error: Exception | None) -> None:
        """Let all calls fail."""
        super().connection_lost(error)
        self.failed(HandshakeFailed("it has closed the connection"))
        for arrived in self._calls.values():
            arrived.put_nowait(None)
        self._on_end()


def _read(content: bytearray) -> Any:
    try:
        return decoded(content)
    except UnreadableMessage as error:
        logger.error("a message of a replica cannot be read: %s", error)    # noqa: TRY400
        raise ModelFailed("a replica has sent what cannot be read", remedy=SEE_LOG) from error


def _lost() -> ReplicaLost:
    return ReplicaLost("the replica died before it had answered", remedy="try again")
