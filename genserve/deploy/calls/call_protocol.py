"""Call protocol: frames over a connection between an ingress and a replica.

Each side begins with a hello, the ingress first: the version of genserve, and a nonce. Then each proves
that it knows the secret of the replica, by an HMAC of both hellos, and neither sends it: the replica first,
so that the ingress tells nothing to whatever else listens on its port, and no message is read of who has
not proved it.

A frame is the number of bytes of its content, its kind, the number of its call, and the content. A message
(see `message_codec.py`) that is longer than a chunk comes in several, between which the frames of other
calls pass. The ingress sends CALL with the method and its argument, and END_CALL for a call that nobody
waits for any more; the replica sends an ITEM for each item of a call, and ENDED after the last one. A
replica sends no more of a call than a window ahead of what the ingress says that it has read (READ), so a
client that reads slowly holds up its own call, and no other. Both send ALIVE as a sign of life.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import ssl
import struct
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from genserve.deploy.calls.message_codec import encoded
from genserve.version import __version__

PROTOCOL = 3        # raise it with each change of the frames or of the messages
SECRET_BYTES = 32
HANDSHAKE_S = 10.0  # for a connection to prove that it knows the secret
# How often each side sends something, and after which time without anything the other machine has vanished.
SIGN_OF_LIFE_S = 5.0
SILENCE_S = 30.0
# A token waits for at most one chunk of each large message: 2 ms at 1 Gb/s.
CHUNK_BYTES = 256 << 10
# A call's items that the ingress has not read have at most this size. A larger item is sent when all other
# items are read.
WINDOW_BYTES = 1 << 20

_HEADER = struct.Struct("!IBI")
_HELLO_BYTES = 1024     # at most, as is a proof: the other side is not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPort:
    """Where one replica takes calls.

    Attributes:
        replica: an id that all connections to the replica have, and no connection to another replica.
        host: address of its machine.
        port: the port on which the replica listens.
        secret: the secret that callers must know.
    """

    replica: str
    host: str
    port: int
    secret: bytes = field(repr=False)


class Frame(IntEnum):
    """The kinds of frames."""

    HELLO = 1
    PROOF = 2
    ALIVE = 3
    PART = 4        # the front of the next message of a call
    CALL = 5        # begins a call: a method of `ModelReplica` that yields items, and its argument
    END_CALL = 6    # ends one before its last item
    READ = 7        # how many more bytes of a call's items have been read
    ITEM = 8        # an item of a call
    ENDED = 9       # a call has no more items; its message is None, or the error with which it failed
    STOPPING = 10   # a replica takes no more calls; its running calls go on


_GREETING = (Frame.HELLO, Frame.PROOF)
_FRAMES = {int(kind): kind for kind in Frame}
# Before which parts may have come: of their own message if they have no content, or of one that was dropped.
_AFTER_PARTS = (Frame.CALL, Frame.ITEM, Frame.ENDED, Frame.END_CALL)


class HandshakeFailed(ConnectionError):
    """The other side of a connection runs another version of genserve, or does not know the secret."""


class MessageProtocol(asyncio.Protocol):
    """One side of a connection.

    Attributes:
        heard_s: when something was last received; a time of the event loop.
        is_trusted: whether the other side has proved its knowledge of the secret.
    """

    def __init__(self) -> None:
        self.is_trusted = False
        self._event_loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._parts: dict[int, bytearray] = {}      # messages whose end is missing, by call
        self._checking: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.heard_s = self._event_loop.time()

    @abstractmethod
    def handshake_received(self, kind: Frame, content: bytes) -> None:
        """Handle a HELLO or PROOF. Raises HandshakeFailed, which closes the connection."""

    @abstractmethod
    def frame_received(self, kind: Frame, number: int, content: bytearray) -> None:
        """Handle a frame of a call, whose message is whole."""

    @abstractmethod
    def failed(self, error: HandshakeFailed) -> None:
        """Record why the connection is closed."""

    @property
    def is_closing(self) -> bool:
        """Whether the connection is closed."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection, and with it its calls."""
        self._transport.close()

    def send(self, kind: Frame, number: int = 0, content: bytes | memoryview = b"") -> None:
        """Send a frame; does nothing if the connection is closed."""
        if not self._transport.is_closing():
            self._transport.write(_HEADER.pack(len(content), kind, number) + content)

    async def send_message(self, kind: Frame, number: int, message: Any) -> int:
        """Send a message, and wait while the other side reads too slowly; return how many bytes it has.

        Raises whatever pickling raises, before anything is sent.
        """
        parts = encoded(message)
        num_bytes = sum(map(len, parts))
        if num_bytes <= CHUNK_BYTES:
            self.send(kind, number, b"".join(parts) if len(parts) > 1 else parts[0])
        else:
            for chunk in _chunks(parts):
                self.send(Frame.PART, number, chunk)
                await self._writable.wait()
            self.send(kind, number)
        if not self._writable.is_set():
            await self._writable.wait()
        return num_bytes

    def trust(self) -> None:
        """Begin to receive frames of calls, and to send signs of life."""
        self.is_trusted = True
        self.check()

    def connection_made(self, transport: asyncio.Transport) -> None:    # type: ignore[override]
        """Begin; asyncio calls this."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Handle the bytes that have arrived; asyncio calls this."""
        self.heard_s = self._event_loop.time()
        received = self._received
        received += data
        start = 0
        while len(received) >= (begin := start + _HEADER.size):
            if self._transport.is_closing():    # a transport may hand over what has arrived meanwhile
                return
            num_bytes, kind, number = _HEADER.unpack_from(received, start)
            if not self.is_trusted and (num_bytes > _HELLO_BYTES or kind not in _GREETING):
                self._fail(HandshakeFailed("it does not speak the protocol of genserve's replicas"))
                return
            end = begin + num_bytes
            if len(received) < end:
                break
            self._receive_frame(_FRAMES[kind], number, received[begin:end])
            start = end
        del received[:start]

    def _receive_frame(self, kind: Frame, number: int, content: bytearray) -> None:
        if not self.is_trusted:
            try:
                self.handshake_received(kind, bytes(content))
            except HandshakeFailed as error:
                self._fail(error)
        elif kind is Frame.PART:
            self._parts.setdefault(number, bytearray()).extend(content)
        elif kind is not Frame.ALIVE:
            if self._parts and kind in _AFTER_PARTS:
                parts = self._parts.pop(number, content)
                content = content or parts
            self.frame_received(kind, number, content)

    def _fail(self, error: HandshakeFailed) -> None:
        self.failed(error)
        self.close()

    def pause_writing(self) -> None:
        """Pause writing, since the other side reads too slowly; asyncio calls this."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Resume writing, since the other side has read enough; asyncio calls this."""
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Release who waits to write; asyncio calls this."""
        self._writable.set()
        if self._checking is not None:
            self._checking.cancel()

    def check(self) -> None:
        """Send signs of life from now on, and close the connection if the other side sends none."""
        if self._event_loop.time() - self.heard_s > SILENCE_S:
            self._transport.abort()
        else:
            self.send(Frame.ALIVE)
            self._checking = self._event_loop.call_later(SIGN_OF_LIFE_S, self.check)


def new_hello() -> bytes:
    """Return a hello of this process, with a nonce."""
    content = {"protocol": PROTOCOL, "genserve": __version__, "nonce": secrets.token_hex(SECRET_BYTES)}
    return json.dumps(content).encode()


def check_hello(content: bytes) -> None:
    """Raise HandshakeFailed if a hello is not of this version: its messages would have other fields."""
    try:
        hello = json.loads(content)
        theirs = hello["protocol"], hello["genserve"]
    except (ValueError, TypeError, KeyError):
        raise HandshakeFailed("its hello is not one of genserve's") from None
    if theirs != (PROTOCOL, __version__):
        raise HandshakeFailed(
            f"it runs genserve {theirs[1]} with protocol {theirs[0]} of calls, and this is genserve "
            f"{__version__} with protocol {PROTOCOL}: install one version on all machines"
        )


def proof(secret: bytes, role: Literal["ingress", "replica"], *, hellos: tuple[bytes, bytes]) -> bytes:
    """Return the proof that a side knows the secret.

    Args:
        secret: the secret that ingress and replica share.
        role: the side that makes the proof; without a role, a side could send back the other side's proof.
        hellos: the ingress's and the replica's; their nonces make the proof another one on each connection.
    """
    return hmac.digest(secret, b"\0".join((role.encode(), *hellos)), "sha256")


def check_proof(
    content: bytes, secret: bytes, role: Literal["ingress", "replica"], *, hellos: tuple[bytes, bytes]
) -> None:
    """Raise HandshakeFailed if a proof is not that of the side with this role."""
    if not hmac.compare_digest(content, proof(secret, role, hellos=hellos)):
        raise HandshakeFailed("it does not know the secret of the replica")


def tls_of_cluster(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """Return the context of a cluster that uses TLS, from Ray's variables; None: it does not."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _chunks(parts: list[bytes | memoryview]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]
