"""API key: how a client shows the server that it may ask."""

from __future__ import annotations

import hmac

from genserve.errors import InvalidRequest

__all__ = ["bearer", "is_bearer"]


def bearer(api_key: str) -> str:
    """Return the value of the header `Authorization`.

    Raises:
        InvalidRequest: no header can hold the key, which is not told: it is a secret.
    """
    if not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        raise InvalidRequest(
            "the API key is not one that a header can hold",
            remedy="printable ASCII, without a space or a line end around it",
            field="api_key",
        )
    return f"Bearer {api_key}"


def is_bearer(authorization: bytes, expected: bytes) -> bool:
    """Whether a header `Authorization` is the `expected` one of `bearer`, compared in constant time.

    The word Bearer may be written in either case (RFC 9110, section 11.1).
    """
    scheme, _, key = authorization.partition(b" ")
    return hmac.compare_digest(scheme.capitalize() + b" " + key, expected)
