"""Client: the SDK that calls a server over HTTP, from threads or from an event loop."""

from __future__ import annotations

from genserve.client.api_calls import Decision, ModelCard
from genserve.client.client import AsyncClient, AsyncStream, Client, OpeningStream
from genserve.completion import Stream

__all__ = ["AsyncClient", "AsyncStream", "Client", "Decision", "ModelCard", "OpeningStream", "Stream"]
