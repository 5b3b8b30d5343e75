"""Parameters: what config.pbtxt says as strings, read as numbers and as yes or no."""

from __future__ import annotations

from collections.abc import Mapping

from genserve.config.byte_size import byte_size
from genserve.errors import RepositoryError

__all__ = ["boolean_parameter", "bytes_parameter", "integer_parameter"]

_BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


def boolean_parameter(parameters: Mapping[str, str], key: str, *, default: bool) -> bool:
    """Return a parameter that is written true, on, 1, false, off or 0, in any case of letters.

    Raises:
        RepositoryError: it is written in another way; in Triton's words.
    """
    if key not in parameters:
        return default
    value = _BOOLEANS.get(parameters[key].lower())
    if value is None:
        raise RepositoryError(
            f"failed to convert '{parameters[key]}' to boolean",
            remedy=f"write true or false for the parameter {key} in config.pbtxt",
        )
    return value


def bytes_parameter(parameters: Mapping[str, str], key: str) -> int | None:
    """Return a parameter that is an amount of memory, such as 2GiB; None if it is not there.

    Raises:
        RepositoryError: it is something else.
    """
    if key not in parameters:
        return None
    value = byte_size(parameters[key])
    if value is None:
        raise RepositoryError(
            f"failed to convert '{parameters[key]}' to bytes",
            remedy=f"write an amount such as 2GiB for the parameter {key} in config.pbtxt",
        )
    return value


def integer_parameter(parameters: Mapping[str, str], key: str, *, default: int) -> int:
    """Return a parameter that is a whole number.

    Raises:
        RepositoryError: it is not; in Triton's words.
    """
    try:
        return int(parameters.get(key, default))
    except ValueError as error:
        raise RepositoryError(
            f"failed to convert '{parameters[key]}' to integral number",
            remedy=f"write a whole number for the parameter {key} in config.pbtxt",
        ) from error
