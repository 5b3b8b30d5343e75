"""Ignored fields: what a request says and nothing comes of, named in a header of its answer."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import Response

__all__ = ["name_ignored"]

MAX_CHARS = 1024


def name_ignored(response: Response, names: Iterable[str]) -> None:
    """Write the names of fields into `x-genserve-ignored`, if there are any that a header can hold."""
    if named := ",".join(name for name in names if name.isascii() and name.isprintable()):
        response.headers["x-genserve-ignored"] = named[:MAX_CHARS]
