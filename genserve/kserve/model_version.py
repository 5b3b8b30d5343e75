"""Model version: how requests write it."""

from __future__ import annotations

from genserve.errors import InferenceError
from genserve.kserve.leading_number import leading_number

__all__ = ["read_version"]

_MAX = 2**63 - 1


def read_version(text: str) -> int:
    """Return the number of a version; -1, the latest, for an empty text.

    Raises:
        InferenceError: it is none.
    """
    if not text:
        return -1
    version = leading_number(text)
    if version is None or abs(version) > _MAX:
        raise InferenceError(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    if version < 0:
        raise InferenceError(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    return version
