"""Server: the HTTP faces of a repository."""

from __future__ import annotations

from genserve.server.serve import serve
from genserve.server.server_info import ModelInfo, ServerInfo, VersionInfo

__all__ = ["ModelInfo", "ServerInfo", "VersionInfo", "serve"]
