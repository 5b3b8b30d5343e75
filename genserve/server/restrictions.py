"""Restrictions: parts of the protocols that are only for clients with a header of their own."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from genserve.errors import Forbidden, GenserveError

__all__ = ["Restriction", "Restrictions", "check_restriction", "parse_restrictions"]

# Triton's names of the parts.
_PARTS = (
    "health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics",
    "trace", "logging",
)  # fmt: skip
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")     # RFC 9110, section 5.6.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """The header that a part asks for."""

    header: str         # in lower case
    value: bytes

    def is_met_by(self, given: str | bytes | None) -> bool:
        """Whether this is the value; compared in constant time."""
        if given is None:
            return False
        return hmac.compare_digest(given.encode() if isinstance(given, str) else given, self.value)


Restrictions: TypeAlias = Mapping[str, Restriction]     # by part; what is not in it is open


def parse_restrictions(words: Iterable[str], *, prefix: str = "") -> Restrictions:
    """Read the values of `--http-restricted-api` or `--grpc-restricted-protocol`.

    Args:
        words: each "PART,PART:HEADER=VALUE".
        prefix: of the headers.

    Raises:
        GenserveError: one is not of this form, or names no part, or one that another has named. The message
            does not tell the value: it is a secret.
    """
    restrictions: dict[str, Restriction] = {}
    for word in words:
        parts, _, pair = word.partition(":")
        header, _, value = pair.partition("=")
        if not (parts and _HEADER.fullmatch(header) and value and value.isascii() and value.isprintable()):
            raise GenserveError(
                "a restriction is not of the form PART,PART:HEADER=VALUE, with a header's name and a "
                "value in printable ASCII",
                remedy="write for example --http-restricted-api=model-repository,logging:admin-key=SECRET",
            )
        for part in parts.split(","):
            if part not in _PARTS:
                raise GenserveError(
                    f"'{part}' is not a part of the protocol that can be restricted",
                    remedy=f"parts: {', '.join(_PARTS)}",
                )
            if part in restrictions:
                raise GenserveError(
                    f"'{part}' is restricted twice", remedy="name each part once: it asks for one header"
                )
            restrictions[part] = Restriction(header=(prefix + header).lower(), value=value.encode())
    return restrictions


def check_restriction(restriction: Restriction | None, *, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Let a request over HTTP pass, or refuse it in Triton's words.

    Args:
        restriction: of the part that is asked for; None: it is open.
        headers: names in lower case.

    Raises:
        Forbidden: the header is missing, or has another value.
    """
    if restriction is None or restriction.is_met_by(dict(headers).get(restriction.header.encode())):
        return
    raise Forbidden(
        f"This API is restricted, expecting header '{restriction.header}'",
        remedy="send the header with the value that whoever runs the server has given",
    )
