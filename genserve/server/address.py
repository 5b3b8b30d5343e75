"""Address: a host and a port, as they stand in a URL."""

from __future__ import annotations

__all__ = ["address_of"]


def address_of(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
