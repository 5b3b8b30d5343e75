"""API key: the bearer token that a client sends."""

from __future__ import annotations

from genserve.errors import InvalidRequest


def bearer(api_key: str) -> str:
    """Return the value of the header `Authorization`; raises what `require_header_value` raises."""
    require_header_value(api_key)
    return f"Bearer {api_key}"


def require_header_value(api_key: str) -> None:
    """Reject a key that no header can hold.

    Raises:
        InvalidRequest: the message does not quote it.
    """
    if not (api_key and api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        raise InvalidRequest(
            "the API key is not a valid header value",
            remedy="use printable ASCII, without leading or trailing blanks",
            field="api_key",
        )
