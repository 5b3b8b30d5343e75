"""Generation handler: answers a generation request of any dialect."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import Response

__all__ = ["add_ignored_header"]


MAX_CHARS = 1024


def add_ignored_header(response: Response, names: Iterable[str]) -> None:
    """Write the names of fields into `x-genserve-ignored`, if there are any that a header can hold."""
    if named := ",".join(name for name in names if name.isascii() and name.isprintable()):
        response.headers["x-genserve-ignored"] = named[:MAX_CHARS]
