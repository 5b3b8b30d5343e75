"""Access control: which requests the ports answer, decided by address and headers before a body is read."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import TypeAlias

from genserve.api_key import bearer, is_bearer
from genserve.errors import Forbidden, GenserveError, Unauthenticated, UnsupportedMediaType
from genserve.settings import ServerSettings

__all__ = [
    "AccessControl",
    "Restriction",
    "Restrictions",
    "address_of",
    "check_restriction",
    "is_loopback",
    "parse_restrictions",
    "require_safe_addresses",
]


def address_of(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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


# Readable without a key: they say yes or no, and name no model.
_OPEN_PATHS = frozenset({"/health", "/v2/health/live", "/v2/health/ready"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # RFC 9110, section 9.2.1
# What a form, or a script without a preflight, can send to any server: https://fetch.spec.whatwg.org/#cors-safelisted-request-header
_JSON = b"application/json"
_FORM = b"application/x-www-form-urlencoded"
_FORM_TYPES = frozenset({_FORM, b"multipart/form-data", b"text/plain"})
# `curl -d` and Triton's client in C++, which is libcurl, declare a form whatever they send. A page cannot
# claim these names without a preflight.
_CURL = (b"curl/", b"libcurl-agent/")
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
_HOST_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-._*")
_SINGLE_LABEL = re.compile(r"[a-z0-9_-]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", re.IGNORECASE)


class AccessControl:
    """The rules of one port.

    1. The Host header names this machine, so that no web site can have its own name resolve to it (DNS
       rebinding). Checked where a stolen request would be answered: on loopback, and where clients need
       neither a key nor a certificate.
    2. A browser's request comes from a page of this server, or from an allowed origin.
    3. A request that acts has no content type that a form can have.
    4. Whoever asks knows the key, if there is one; it is compared in constant time.
    """

    def __init__(self, settings: ServerSettings, *, host: str, asks_key: bool = True) -> None:
        """Read the rules from the settings.

        Args:
            settings: of the server.
            host: the address that the port listens on.
            asks_key: whether the port asks for the key, if the server has one.

        Raises:
            InvalidRequest: no header can hold the key.
        """
        self._key = bearer(settings.api_key).encode() if settings.api_key and asks_key else None
        self._origins = frozenset(map(_origin, settings.allowed_origins))
        names = frozenset(map(_host_pattern, settings.allowed_hosts))
        is_local = is_loopback(host)
        if not is_local and (settings.api_key or settings.ssl_ca_certs) and not (names and asks_key):
            names = frozenset({"*"})
        # Each form of the header is looked at once: `infer` is called some thousand times a second.
        self._is_known = lru_cache(maxsize=64)(partial(_is_known, names=names, single_labels=not is_local))

    def check(self, *, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Let a request pass, or refuse it.

        Args:
            method: in upper case.
            path: without the query.
            headers: names in lower case.

        Raises:
            Forbidden: rule 1 or 2.
            UnsupportedMediaType: rule 3.
            Unauthenticated: rule 4.
        """
        given = dict(headers)
        host = given.get(b"host")
        if host is not None and not self._is_known(host):
            raise _unknown_host(host)
        if self._is_foreign(given, method=method):
            raise Forbidden(
                "the request comes from a web page of another origin",
                remedy="if the page is yours, start the server with --allowed-origin and the page's origin, "
                "such as http://localhost:3000",
            )
        if method not in _SAFE_METHODS and _is_form(given):
            raise UnsupportedMediaType(
                "the content type is one that any web page can send",
                remedy="send the header `Content-Type: application/json`",
            )
        if self._key is None or path in _OPEN_PATHS:
            return
        if not is_bearer(given.get(b"authorization", b""), self._key):
            raise Unauthenticated(
                "the API key is missing or wrong", remedy="send the header `Authorization: Bearer KEY`"
            )

    def _is_foreign(self, given: dict[bytes, bytes], *, method: str) -> bool:
        """Whether a browser sends this for a page of another origin; as net/http.CrossOriginProtection of Go.

        `Sec-Fetch-Site` tells it, which browsers send to loopback and over TLS, else `Origin`, which
        they send with everything that is not GET or HEAD.
        """
        origin, site = given.get(b"origin"), given.get(b"sec-fetch-site")
        if origin is not None and (origin in self._origins or b"*" in self._origins):
            return False
        if site is not None:
            # A link from elsewhere may lead here: the page that has it sees nothing of the answer.
            mode, destination = given.get(b"sec-fetch-mode"), given.get(b"sec-fetch-dest")
            is_link = method in _SAFE_METHODS and mode == b"navigate" and destination == b"document"
            return site not in (b"same-origin", b"none") and not is_link
        if origin is None:
            return False
        scheme, _, place = origin.partition(b"://")
        port = _DEFAULT_PORTS.get(scheme, b"")
        return place.removesuffix(port) != given.get(b"host", b"").lower().removesuffix(port)


def _host_pattern(text: str) -> str:
    """Return a value of `--allowed-host` in lower case; raises GenserveError for what matches no host."""
    if not text or not set(text.lower()) <= _HOST_CHARACTERS:
        raise GenserveError(
            f"--allowed-host {text!r} is not a host name",
            remedy="write the name without scheme and port: models.example",
        )
    return text.lower()


def _origin(text: str) -> bytes:
    """Return a value of `--allowed-origin` as browsers send it; raises GenserveError for what is none."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise GenserveError(
            f"--allowed-origin {text!r} is not an origin",
            remedy="write scheme and host, without a slash at the end: https://app.example, http://localhost:3000",
        )
    return text.lower().encode()


def _is_known(host: bytes, *, names: frozenset[str], single_labels: bool) -> bool:
    """Whether a Host header names an address, this machine by `localhost`, or one of `names`.

    An address cannot be rebound: a page that was loaded from it is a page of this server. With
    `single_labels` names without a dot are known, too, as containers have them on their network: the public
    DNS has none, and whoever is on that network reaches the port without a web page.
    """
    text = host.decode("latin-1").lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    name = name.rstrip(".")
    return (
        name == "localhost"
        or name.endswith(".localhost")  # RFC 6761, section 6.3: never asked of a name server
        or _address(name) is not None
        or (single_labels and _SINGLE_LABEL.fullmatch(name) is not None)
        or any(fnmatchcase(name, pattern) for pattern in names)
    )


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _unknown_host(host: bytes) -> Forbidden:
    name = host[:128].decode("latin-1").partition(":")[0]
    readable = ascii(name)[1:-1]
    return Forbidden(
        f"the server does not answer to the host name {readable!r}",
        remedy=f"start it with --allowed-host {readable} if clients, or a proxy, know it by this name",
    )


def _is_form(given: dict[bytes, bytes]) -> bool:
    content_type = given.get(b"content-type", _JSON)
    if content_type == _JSON:
        return False
    content_type = content_type.partition(b";")[0].strip().lower()
    if content_type == _FORM and given.get(b"user-agent", b"").startswith(_CURL):
        return False
    return content_type in _FORM_TYPES


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name is resolved, and every address must be one."""
    address = _address(host)
    if address is not None:
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    if not host:
        return False  # all addresses
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(is_loopback(address) for address in found)


def require_safe_addresses(settings: ServerSettings) -> None:
    """Refuse ports that are open to other machines and ask for no key, unless that was asked for.

    Raises:
        GenserveError: names the flags.
    """
    if settings.api_key or settings.ssl_ca_certs or settings.allow_unauthenticated:
        return
    ports = {"--host": settings.host}
    if settings.allow_grpc and settings.grpc_host:
        ports["--grpc-address"] = settings.grpc_host
    if settings.allow_metrics and settings.metrics_host and not settings.allow_unauthenticated_metrics:
        ports["--metrics-address"] = settings.metrics_host
    for flag, host in ports.items():
        if not is_loopback(host):
            raise GenserveError(
                f"{flag} {host} lets other machines in, and no API key is set",
                remedy="set GENSERVE_API_KEY, listen on 127.0.0.1, or let anybody in with "
                "--allow-unauthenticated (GENSERVE_ALLOW_UNAUTHENTICATED=true in a container)",
            )
