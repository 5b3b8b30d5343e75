"""Client credentials: the API key and the certificate that the SDK and the command line show to servers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from genserve.errors import InvalidRequest

if TYPE_CHECKING:
    import ssl  # which the help of the command line does not need

_VARIABLE = "GENSERVE_CLIENT_CERT"


def has_client_certificate() -> bool:
    """Whether GENSERVE_CLIENT_CERT names a file."""
    return bool(os.environ.get(_VARIABLE))


def load_client_certificate(context: ssl.SSLContext) -> None:
    """Let connections use the certificate and key in the PEM file of GENSERVE_CLIENT_CERT, if it is set.

    Raises:
        InvalidRequest: the file cannot be read, or lacks one of them.
    """
    file = os.environ.get(_VARIABLE)
    if not file:
        return
    try:
        context.load_cert_chain(file)
    except OSError as error:    # also ssl.SSLError
        raise InvalidRequest(
            f"{_VARIABLE}: {file} cannot be used: {getattr(error, 'reason', None) or error.strerror}",
            remedy="name a PEM file with the certificate and its private key",
        ) from error


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
