"""Server: a model repository over HTTP and gRPC."""

from __future__ import annotations

from genserve.server.api_server import ModelInfo, ServerInfo, serve

__all__ = ["ModelInfo", "ServerInfo", "serve"]
