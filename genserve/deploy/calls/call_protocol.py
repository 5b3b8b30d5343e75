"""Call protocol: messages over a connection between an ingress and a replica.

An ingress begins with the secret of the replica. From then on both sides send pickled messages, each after
its length in 8 bytes. The ingress sends a `Call`, or an `EndCall` for one that nobody waits for any more; the
replica a `CallItem` for each item of a call and `CallEnded` after the last one. Both send
None as a sign of life.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import ssl
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from genserve.errors import GenserveError

SECRET_BYTES = 32
SECRET_S = 10.0     # for a connection to send it
# How often each side sends something, and after which time without anything the other machine has vanished.
SIGN_OF_LIFE_S = 5.0
SILENCE_S = 30.0

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPort:
    """Where one replica takes calls.

    Attributes:
        replica: the same for all connections to it, and another one for any other replica.
        host: address of its machine.
        port: on which it listens.
        secret: who sends it may call, which is to run code: messages are pickled.
    """

    replica: str
    host: str
    port: int
    secret: bytes = field(repr=False)


class Call(NamedTuple):
    """A call of a method of `ModelReplica` that yields items; its number is unique on the connection."""

    number: int
    method: Literal["generate", "infer"]
    argument: Any


class EndCall(NamedTuple):
    """Ends a call before its last item."""

    number: int


class CallItem(NamedTuple):
    """An item of a call."""

    number: int
    item: Any


class CallEnded(NamedTuple):
    """A call has no more items; with an error it failed."""

    number: int
    error: GenserveError | None


class Stopping(NamedTuple):
    """A replica takes no more calls; those that it has go on."""


class MessageProtocol(asyncio.Protocol):
    """One side of a connection.

    Attributes:
        heard_s: when something was last received; a time of the event loop.
    """

    def __init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._checking: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.heard_s = self._event_loop.time()

    @abstractmethod
    def message_received(self, message: Any) -> None:
        """Take a message."""

    def send(self, message: Any) -> None:
        """Send a message; does nothing if the connection is closed."""
        content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._transport.write(len(content).to_bytes(_LENGTH_BYTES) + content)

    async def writable(self) -> None:
        """Wait while the other side reads too slowly."""
        await self._writable.wait()

    def connection_made(self, transport: asyncio.Transport) -> None:    # type: ignore[override]
        """Begin; asyncio calls this."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take what has arrived; asyncio calls this."""
        self.heard_s = self._event_loop.time()
        received = self._received
        received += data
        start = 0
        while len(received) >= (content := start + _LENGTH_BYTES):
            end = content + int.from_bytes(received[start:content])
            if len(received) < end:
                break
            self.message_received(pickle.loads(received[content:end]))
            start = end
        del received[:start]

    def pause_writing(self) -> None:
        """Note that the other side reads too slowly; asyncio calls this."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Note that it has read enough; asyncio calls this."""
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Release who waits to write; asyncio calls this."""
        self._writable.set()
        if self._checking is not None:
            self._checking.cancel()

    def check(self) -> None:
        """Give signs of life from now on, and close the connection if the other side gives none."""
        if self._event_loop.time() - self.heard_s > SILENCE_S:
            self._transport.abort()
        else:
            self.send(None)
            self._checking = self._event_loop.call_later(SIGN_OF_LIFE_S, self.check)


def tls_of_cluster(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """Return the context of a cluster that uses TLS, from Ray's variables; None: it does not."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.verify_mode = ssl.CERT_REQUIRED
    return context
