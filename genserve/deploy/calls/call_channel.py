"""Call channel: an ingress's side of the connection to one replica."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from genserve.deploy.calls.call_protocol import (
    Call,
    CallEnded,
    CallItem,
    CallPort,
    EndCall,
    MessageProtocol,
    Stopping,
    tls_of_cluster,
)
from genserve.errors import ReplicaLost

_CONNECT_S = 5.0


class CallChannel(MessageProtocol):
    """A connection over which calls of one replica run at the same time.

    The replica may announce that it stops: it then takes no more calls, and those that run go on.
    """

    def __init__(self, on_end: Callable[[], object]) -> None:
        """Call `on_end` when the replica takes no more calls, or is lost, or both."""
        super().__init__()
        self._on_end = on_end
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Queue[CallItem | CallEnded]] = {}

    @classmethod
    async def open(cls, port: CallPort, *, on_end: Callable[[], object]) -> CallChannel:
        """Connect to a replica.

        Raises:
            OSError: it cannot be reached within some seconds.
        """
        async with asyncio.timeout(_CONNECT_S):
            _, channel = await asyncio.get_running_loop().create_connection(
                lambda: cls(on_end), port.host, port.port, ssl=tls_of_cluster(ssl.Purpose.SERVER_AUTH)
            )
        channel._transport.write(port.secret)
        channel.check()
        return channel

    async def call(self, method: Literal["generate", "infer"], argument: Any) -> AsyncIterator[Any]:
        """Yield the items of a call; closing the iterator ends it at the replica.

        Raises:
            ReplicaLost: the connection is lost.
            GenserveError: whatever the replica raised.
        """
        number = next(self._numbers)
        arrived: asyncio.Queue[CallItem | CallEnded] = asyncio.Queue()
        if self.is_lost:
            raise _lost()
        self.send(Call(number, method, argument))
        self._calls[number] = arrived
        ended = False
        try:
            while True:
                message = await arrived.get()
                if isinstance(message, CallEnded):
                    ended = True
                    if message.error is not None:
                        raise message.error
                    return
                yield message.item
        finally:
            del self._calls[number]
            if not ended:
                self.send(EndCall(number))

    def message_received(self, message: CallItem | CallEnded | Stopping | None) -> None:
        """Hand an item to the call that it belongs to."""
        if isinstance(message, CallItem | CallEnded):
            if message.number in self._calls:
                self._calls[message.number].put_nowait(message)
        elif isinstance(message, Stopping):
            self._on_end()

    def connection_lost(self, error: Exception | None) -> None:
        """Let all calls fail."""
        super().connection_lost(error)
        for number, arrived in self._calls.items():
            arrived.put_nowait(CallEnded(number, _lost()))
        self._on_end()

    @property
    def is_lost(self) -> bool:
        """Whether the connection is closed."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection; its calls fail."""
        self._transport.close()


def _lost() -> ReplicaLost:
    return ReplicaLost("the replica died before it had answered", remedy="try again")
