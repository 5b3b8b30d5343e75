"""Server: the HTTP faces of a repository."""

from __future__ import annotations

from genserve.server.serve import ModelInfo, ServerInfo, VersionInfo, serve

__all__ = ["ModelInfo", "ServerInfo", "VersionInfo", "serve"]
