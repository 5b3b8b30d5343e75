"""API key: the bearer token that a client sends and the server compares."""

from __future__ import annotations

import hmac

from genserve.errors import InvalidRequest


def bearer(api_key: str) -> str:
    """Return the value of the header `Authorization`.

    Raises:
        InvalidRequest: the key is not a valid header value. The message does not quote it.
    """
    if not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        raise InvalidRequest(
            "the API key is not a valid header value",
            remedy="use printable ASCII, without leading or trailing blanks",
            field="api_key",
        )
    return f"Bearer {api_key}"


def is_bearer(authorization: bytes, expected: bytes) -> bool:
    """Whether a header `Authorization` equals the `expected` value of `bearer`, compared in constant time.

    The scheme is case-insensitive (RFC 9110, section 11.1).
    """
    scheme, _, key = authorization.partition(b" ")
    return hmac.compare_digest(scheme.capitalize() + b" " + key, expected)
