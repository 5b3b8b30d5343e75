"""Client: the SDK over HTTP, for threads and for event loops."""

from __future__ import annotations

from genserve.client.api_calls import ModelCard
from genserve.client.client import AsyncClient, AsyncStream, Client, OpeningStream
from genserve.completion import Stream

__all__ = ["AsyncClient", "AsyncStream", "Client", "ModelCard", "OpeningStream", "Stream"]
