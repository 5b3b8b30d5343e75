"""Forwarded headers: those whose names match a pattern become parameters of the request for the model."""

from __future__ import annotations

import re
from collections.abc import Iterable

from genserve.errors import InferenceError
from genserve.inference import Parameter

# Parameters that the protocol defines, for which no header may pass (kReservedParameterKeys of Triton).
_RESERVED = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
# Names are matched in any case, as header names are. A switch of RE2, Triton's library, changes that.
_IN_THIS_CASE = "(?-i)"


def header_pattern(pattern: str) -> re.Pattern[str]:
    """Compile the value of `--http-header-forward-pattern` or `--grpc-header-forward-pattern`.

    Raises:
        re.error: it is not a regular expression.
    """
    if pattern.startswith(_IN_THIS_CASE):
        return re.compile(pattern.removeprefix(_IN_THIS_CASE))
    return re.compile(pattern, re.IGNORECASE)


def forwarded_headers(headers: Iterable[tuple[str, str]], pattern: str) -> dict[str, Parameter]:
    """Return the headers whose names match; an empty pattern matches none.

    Raises:
        InferenceError: the name of one is reserved.
    """
    if not pattern:
        return {}
    search = header_pattern(pattern).search
    forwarded: dict[str, Parameter] = {name: value for name, value in headers if search(name)}
    for name in forwarded:
        if name in _RESERVED or name.startswith("triton_"):
            raise InferenceError(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
    return forwarded
