"""Client credentials: the API key, client certificate and TLS context of the SDK and the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from genserve.errors import InvalidRequest, Unreachable

if TYPE_CHECKING:
    import ssl  # not needed for the help of the command line

_VARIABLE = "GENSERVE_CLIENT_CERT"
_WRONG_NAME = (62, 64)      # OpenSSL's codes: the certificate is for another host name, or IP address


def has_client_certificate() -> bool:
    """Whether GENSERVE_CLIENT_CERT names a file."""
    return bool(os.environ.get(_VARIABLE))


def load_client_certificate(context: ssl.SSLContext) -> None:
    """Let connections use the certificate and key in the PEM file of GENSERVE_CLIENT_CERT, if it is set.

    Raises:
        InvalidRequest: the file cannot be read, or lacks the certificate or the key.
    """
    file = os.environ.get(_VARIABLE)
    if not file:
        return
    try:
        context.load_cert_chain(file)
    except OSError as error:    # also ssl.SSLError, without a reason if the certificate or the key is missing
        reason = getattr(error, "reason", error.strerror) or "it lacks the certificate or the key"
        raise InvalidRequest(
            f"{_VARIABLE}: {file} cannot be used: {reason}",
            remedy="name a PEM file with the certificate and its private key",
        ) from error


def tls_context(*, ca: Path | None, insecure: bool) -> ssl.SSLContext:
    """Return a context that verifies servers with the system's authorities, with `ca`, or not at all.

    Raises:
        InvalidRequest: `ca` has no certificate, or the certificate in GENSERVE_CLIENT_CERT cannot be used.
    """
    import ssl

    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:    # also ssl.SSLError
        raise InvalidRequest(
            f"{ca} has no certificates: {error.strerror or error}",
            remedy="name a PEM file with the certificate of the authority",
            field="ca",
        ) from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    load_client_certificate(context)
    return context


def tls_failure(error: BaseException, *, url: str) -> Unreachable | None:
    """Return the exception for a connection error that TLS caused, so that no retry helps.

    None: the error has another cause.
    """
    import ssl

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    reason = getattr(cause, "reason", None) or ""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return Unreachable(
            f"the certificate of {url} is not trusted: {cause.verify_message.rstrip('.')}",
            remedy="use a name that the certificate has"
            if cause.verify_code in _WRONG_NAME
            else "name the certificate of its authority: --ca FILE, verify= in Python, or SSL_CERT_FILE",
        )
    if reason == "WRONG_VERSION_NUMBER":
        return Unreachable(f"the server at {url} does not speak TLS", remedy="write http:// for https://")
    if "CERTIFICATE" in reason:     # the server has sent an alert
        return Unreachable(
            f"the server at {url} asks for a certificate of the client, or rejects it",
            remedy=f"set {_VARIABLE} to a PEM file with a certificate and its private key",
        )
    return None


def bearer(api_key: str) -> str:
    """Return the value of the header `Authorization`; raises what `require_header_value` raises."""
    require_header_value(api_key)
    return f"Bearer {api_key}"


def require_header_value(api_key: str) -> None:
    """Reject a key that no header can hold.

    Raises:
        InvalidRequest: a character of the key is not allowed; the message does not quote the key.
    """
    if not (api_key and api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        raise InvalidRequest(
            "the API key is not a valid header value",
            remedy="use printable ASCII, without leading or trailing blanks",
            field="api_key",
        )
