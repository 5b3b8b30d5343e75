"""Client: the SDK over HTTP, for threads and for event loops."""

from __future__ import annotations

from genserve.client.async_client import AsyncClient
from genserve.client.client import Client
from genserve.client.stream import AsyncStream, OpeningStream
from genserve.stream import Stream

__all__ = ["AsyncClient", "AsyncStream", "Client", "OpeningStream", "Stream"]
