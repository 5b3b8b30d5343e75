"""TLS: the server's certificate, for the HTTP ports and for gRPC."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from genserve.errors import GenserveError
from genserve.settings import ServerSettings


def ssl_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return the TLS context of the HTTP ports; None: no TLS.

    Raises:
        GenserveError: a file cannot be read or is not PEM, or key and certificate do not match.
    """
    certificate, key, authorities = settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs
    if certificate is None:
        if key or authorities:
            raise GenserveError(
                "--ssl-keyfile and --ssl-ca-certs need --ssl-certfile", remedy="name the server's certificate"
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=_reject_password)
    except OSError as error:  # ssl.SSLError is one
        raise _unusable("certificate and key", certificate, key, error=error) from error
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except OSError as error:
            raise _unusable("certificates of --ssl-ca-certs", authorities, error=error) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def grpc_credentials(settings: ServerSettings) -> Any:
    """Return the credentials of the gRPC port; None: no TLS. `ssl_context` has checked the files."""
    if settings.ssl_certfile is None:
        return None
    import grpc

    certificate = settings.ssl_certfile.read_bytes()
    key = settings.ssl_keyfile.read_bytes() if settings.ssl_keyfile else certificate
    authorities = settings.ssl_ca_certs.read_bytes() if settings.ssl_ca_certs else None
    return grpc.ssl_server_credentials(
        [(key, certificate)], root_certificates=authorities, require_client_auth=authorities is not None
    )


def _reject_password() -> bytes:
    """Reject an encrypted key; OpenSSL would prompt for its password on the terminal."""
    raise GenserveError(
        "the key of the certificate is encrypted",
        remedy="use an unencrypted key that only this user may read: `openssl pkey -in KEY -out PLAIN`",
    )


def _unusable(content: str, *files: Path | None, error: OSError) -> GenserveError:
    names = " and ".join(str(file) for file in files if file)
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return GenserveError(
        f"the {content} in {names} cannot be used: {reason}",
        remedy="use files in PEM format that this user may read; the key must belong to the certificate",
    )
