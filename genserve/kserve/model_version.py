"""Model version: how requests write it."""

from __future__ import annotations

import re

from genserve.errors import InferenceError

__all__ = ["read_version"]

# As C's `strtol` reads a number: what follows it does not count, and Triton looks at no more.
_NUMBER = re.compile(r"\s*([+-]?\d+)")


def read_version(text: str) -> int:
    """Return the number of a version; -1, the latest, for an empty text.

    Raises:
        InferenceError: it is none.
    """
    if not text:
        return -1
    found = _NUMBER.match(text)
    if found is None:
        raise InferenceError(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    if (version := int(found[1])) < 0:
        raise InferenceError(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    return version
