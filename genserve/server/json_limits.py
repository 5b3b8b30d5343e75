"""JSON limits: how many values a JSON body may have, checked before they become Python objects.

To parse, validate and free values holds the interpreter's lock for a time that depends on their number, not
on their bytes: for 8 MiB of empty lists it is a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from genserve.errors import InvalidRequest

# The token ids of a batch of prompts are the most that a request has need of; these take 20 ms to validate.
MAX_VALUES = 2**18
MAX_CONTAINERS = 2**14      # lists and objects; each may become an object with fields of its own
MAX_KEYS = 2**13            # of one object
MAX_DEPTH = 64


def check_num_values(text: bytes) -> None:
    """Check how many values a JSON text has, of which no two are counted as one.

    Args:
        text: JSON, which may be invalid; the strings in it are not counted as structure.

    Raises:
        InvalidRequest: it has more than `MAX_VALUES` values or `MAX_CONTAINERS` lists and objects.
    """
    if len(text) <= MAX_CONTAINERS:
        return
    if b"\\" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    # The quotes left are those around strings.
    if text.count(b'"') // 2 > MAX_VALUES:
        raise _too_many(MAX_VALUES, "values")
    outside = b"".join(text.split(b'"')[::2])
    if (num_containers := outside.count(b"[") + outside.count(b"{")) > MAX_CONTAINERS:
        raise _too_many(MAX_CONTAINERS, "lists and objects")
    if outside.count(b",") + num_containers > MAX_VALUES:
        raise _too_many(MAX_VALUES, "values")


def check_depth(value: Any, text: str) -> None:
    """Raise InvalidRequest if lists and objects are nested deeper than `MAX_DEPTH`.

    Args:
        value: a parsed JSON text.
        text: it.
    """
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return
    if any(isinstance(value, dict | list) for value in level):
        raise too_deep()


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def too_deep() -> InvalidRequest:
    """Return the error for a text of which `MAX_DEPTH` or the stack does not allow the nesting."""
    return InvalidRequest(
        f"lists and objects of the body are nested deeper than {MAX_DEPTH}", remedy="nest them less"
    )


def check_num_keys(count: int) -> None:
    """Raise InvalidRequest if an object has more than `MAX_KEYS` keys."""
    if count > MAX_KEYS:
        raise _too_many(MAX_KEYS, "keys in one object")


def _too_many(limit: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"the body has more than {limit} {what}", remedy="send several smaller requests")
