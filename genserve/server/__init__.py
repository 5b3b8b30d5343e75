"""Server: the HTTP faces of a repository."""

from __future__ import annotations

from genserve.server.serve import ModelInfo, ServerInfo, serve

__all__ = ["ModelInfo", "ServerInfo", "serve"]
