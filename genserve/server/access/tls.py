"""TLS: the server's certificate, for the HTTP ports and for gRPC, read again when its files change."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from genserve.errors import GenserveError
from genserve.settings import ServerSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """The contents of the files, read together."""

    certificate: bytes
    key: bytes
    authorities: bytes | None


class TlsFiles:
    """The certificate, its key, and the authorities of clients, as every new connection uses them.

    Open connections keep the files that they began with.

    Attributes:
        files: the files whose change calls for `reload`.
        context: what the HTTP ports encrypt with.
    """

    def __init__(self, certificate: Path, *, key: Path | None, authorities: Path | None) -> None:
        """Read the files; `key` is None if the certificate's file has it.

        Raises:
            GenserveError: one cannot be read or is not PEM, or key and certificate do not match.
        """
        self._certificate = certificate
        self._key = key
        self._authorities = authorities
        self.files = tuple(file for file in (certificate, key, authorities) if file is not None)
        self.context = _LatestContext(ssl.PROTOCOL_TLS_SERVER)
        self._contents = self._read()
        self._fetched = self._contents      # by gRPC

    @classmethod
    def of(cls, settings: ServerSettings) -> Self | None:
        """Return the files of a server's settings; None: no TLS. Raises GenserveError."""
        if settings.ssl_certfile is None:
            if settings.ssl_keyfile or settings.ssl_ca_certs:
                raise GenserveError(
                    "--ssl-keyfile and --ssl-ca-certs need --ssl-certfile",
                    remedy="name the server's certificate",
                )
            return None
        return cls(settings.ssl_certfile, key=settings.ssl_keyfile, authorities=settings.ssl_ca_certs)

    def reload(self) -> None:
        """Read the files again. If that fails, log why and keep what was read before."""
        try:
            self._contents = self._read()
        except GenserveError as error:
            logger.error("TLS is unchanged: %s", error)     # noqa: TRY400  # not a bug
        else:
            logger.info("TLS: new connections use what is now in %s", ", ".join(map(str, self.files)))

    def grpc_credentials(self) -> Any:
        """Return the credentials of the gRPC port, which asks for new contents at each handshake."""
        import grpc

        def configuration(contents: _Contents) -> Any:
            return grpc.ssl_server_certificate_configuration(
                [(contents.key, contents.certificate)], root_certificates=contents.authorities
            )

        def fetch() -> Any:
            if self._fetched is self._contents:
                return None     # unchanged
            self._fetched = self._contents
            return configuration(self._fetched)

        return grpc.dynamic_ssl_server_credentials(
            configuration(self._contents), fetch, require_client_authentication=self._authorities is not None
        )

    def _read(self) -> _Contents:
        """Read the files, and let new connections over HTTP use them."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._certificate, self._key, password=_reject_password)
        except OSError as error:  # ssl.SSLError is one
            if isinstance(error, ssl.SSLError) and self._key is None and not _has_key(self._certificate):
                remedy = "name the file of its key with --ssl-keyfile"
                raise GenserveError(f"{self._certificate} has no private key", remedy=remedy) from error
            raise _unusable("certificate and key", self._certificate, self._key, error=error) from error
        if self._authorities is not None:
            try:
                context.load_verify_locations(self._authorities)
            except OSError as error:
                raise _unusable("certificates of --ssl-ca-certs", self._authorities, error=error) from error
            context.verify_mode = ssl.CERT_REQUIRED
        contents = _Contents(
            certificate=self._certificate.read_bytes(),
            key=(self._key or self._certificate).read_bytes(),
            authorities=self._authorities.read_bytes() if self._authorities else None,
        )
        self.context.latest = context
        return contents


class _LatestContext(ssl.SSLContext):
    """Hands each new connection to the latest context.

    An event loop keeps the context that its port was opened with. That context could read new files too, but
    it would keep the old authorities, and sessions that were begun under them could be resumed.
    """

    latest: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin a connection of an event loop."""
        return self.latest.wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        """Begin a connection of a thread."""
        return self.latest.wrap_socket(*args, **kwargs)


def _reject_password() -> bytes:
    """Reject an encrypted key; OpenSSL would prompt for its password on the terminal."""
    raise GenserveError(
        "the key of the certificate is encrypted",
        remedy="use an unencrypted key that only this user may read: `openssl pkey -in KEY -out PLAIN`",
    )


def _has_key(file: Path) -> bool:
    return b"PRIVATE KEY-----" in file.read_bytes()


def _unusable(content: str, *files: Path | None, error: OSError) -> GenserveError:
    names = " and ".join(str(file) for file in files if file)
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    reason = reason or "no PEM format"
    return GenserveError(
        f"the {content} in {names} cannot be used: {reason}",
        remedy="use files in PEM format that this user may read; the key must belong to the certificate",
    )
