"""Access control: which requests the ports accept, decided by address and headers before a body is read."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from genserve.errors import Forbidden, GenserveError, UnsupportedMediaType
from genserve.request_context import RequestContext
from genserve.server.access.key_ring import KeyRing
from genserve.settings import ServerSettings

# Triton's names of the parts of the protocols.
Part: TypeAlias = Literal[
    "health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics",
    "trace", "logging",
]  # fmt: skip
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")     # RFC 9110, section 5.6.2
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # RFC 9110, section 9.2.1
# Content types that a page can send to any server without a preflight: https://fetch.spec.whatwg.org/#cors-safelisted-request-header
_JSON = b"application/json"
_FORM = b"application/x-www-form-urlencoded"
_FORM_TYPES = frozenset({_FORM, b"multipart/form-data", b"text/plain"})
# `curl -d` and Triton's C++ client, which uses libcurl, declare every body as a form. A page cannot set these
# user agents without a preflight.
_CURL = (b"curl/", b"libcurl-agent/")
# The first is HTTP's own; Anthropic's clients and Google's have headers of their own.
_KEY_HEADERS = (b"authorization", b"x-api-key", b"x-goog-api-key")
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
_HOST_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-._*")
_SINGLE_LABEL = re.compile(r"[a-z0-9_-]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What a client needs to call a route, or a method of gRPC.

    Attributes:
        part: the part of the protocol, which the operator may restrict; None: the route belongs to none.
        is_open: clients need no key.
        controls: the route changes the server, so clients need a key that may.
    """

    part: Part | None = None
    is_open: bool = False
    controls: bool = False


INFERENCE = Rights(part="inference")
METADATA = Rights(part="metadata")
HEALTH = Rights(part="health")
PROBE = Rights(part="health", is_open=True)     # the answer is yes or no, and names no model
PAGE = Rights(is_open=True)     # says nothing of the models; a browser cannot send a key with a link
ANY_KEY = Rights()


def address_of(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """The header that requests to a part of the protocol need."""

    header: str         # in lower case
    value: bytes

    def is_met_by(self, given: str | bytes | None) -> bool:
        """Whether the header has the right value; compared in constant time."""
        if given is None:
            return False
        return hmac.compare_digest(given.encode() if isinstance(given, str) else given, self.value)


Restrictions: TypeAlias = Mapping[str, Restriction]     # by part; all others are unrestricted


def parse_restrictions(words: Iterable[str], *, prefix: str = "") -> Restrictions:
    """Parse the values of `--http-restricted-api` or `--grpc-restricted-protocol`.

    Args:
        words: each "PART,PART:HEADER=VALUE".
        prefix: what the names of the headers begin with.

    Raises:
        GenserveError: a word has another form, or names an unknown part, or a part twice. The message leaves
            out the value, which is a secret.
    """
    restrictions: dict[str, Restriction] = {}
    for word in words:
        parts, _, pair = word.partition(":")
        header, _, value = pair.partition("=")
        if not (parts and _HEADER.fullmatch(header) and value and value.isascii() and value.isprintable()):
            raise GenserveError(
                "a restriction must have the form PART,PART:HEADER=VALUE, with a valid header name and a "
                "value in printable ASCII",
                remedy="write for example --http-restricted-api=model-repository,logging:admin-key=SECRET",
            )
        for part in parts.split(","):
            if part not in get_args(Part):
                raise GenserveError(
                    f"'{part}' is not a part of the protocol that can be restricted",
                    remedy=f"parts: {', '.join(get_args(Part))}",
                )
            if part in restrictions:
                raise GenserveError(
                    f"'{part}' is restricted twice", remedy="name each part once: it can need one header"
                )
            restrictions[part] = Restriction(header=(prefix + header).lower(), value=value.encode())
    return restrictions


def _check_restriction(restriction: Restriction, given: Mapping[bytes, bytes]) -> None:
    """Raise Forbidden, with Triton's message, for an HTTP request without the right header."""
    if restriction.is_met_by(given.get(restriction.header.encode())):
        return
    raise Forbidden(
        f"This API is restricted, expecting header '{restriction.header}'",
        remedy="send the header with the value that the operator of the server has set",
    )


class AccessControl:
    """The rules of one port.

    1. The Host header names this machine, which prevents DNS rebinding. Checked where a rebound request
       would be answered: on loopback, and where clients need neither a key nor a certificate.
    2. A browser's request comes from a page of this server, or from an allowed origin.
    3. A request with a method that is not safe has no content type that a form can have.
    4. The request has an API key, if the server needs one, and one that may control the server, if the
       request changes it.
    5. The request has the header that its part of the protocol needs, if the operator has restricted that.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        host: str,
        keys: KeyRing,
        asks_key: bool = True,
        restrictions: Restrictions = MappingProxyType({}),
    ) -> None:
        """Take the rules from the settings.

        Args:
            settings: the server's settings.
            host: the address that the port listens on.
            keys: the server's keys.
            asks_key: whether the port requires a key, if the server does.
            restrictions: the headers that parts of the protocol need on this port.
        """
        self._keys = keys
        self._restrictions = restrictions
        self._asks_key = asks_key
        self._origins = frozenset(map(_origin, settings.allowed_origins))
        names = frozenset(map(_host_pattern, settings.allowed_hosts))
        is_local = is_loopback(host)
        is_closed = keys.is_required or settings.ssl_ca_certs is not None
        if not is_local and is_closed and not (names and asks_key):
            names = frozenset({"*"})
        # Cached, as `infer` is called some thousand times a second.
        self._is_known = lru_cache(maxsize=64)(partial(_is_known, names=names, single_labels=not is_local))

    def admit(
        self,
        request: RequestContext,
        *,
        method: str,
        headers: Iterable[tuple[bytes, bytes]],
        rights: Rights,
    ) -> None:
        """Reject a request that breaks a rule, or exceeds a limit of its key; count one that generates.

        Args:
            request: the record of the request, which gets its key.
            method: the HTTP method, in upper case.
            headers: the request's headers, their names in lower case.
            rights: what the route needs.

        Raises:
            Forbidden: rule 1, 2 or 5.
            UnsupportedMediaType: rule 3.
            Unauthenticated, ControlForbidden: rule 4.
            RateLimited: the key has reached a limit.
        """
        request.controls = rights.controls
        given = dict(headers)
        self._check_origin(given, method=method)
        key = None
        if self._asks_key and self._keys.has_keys:
            key = self._keys.find(credentials(*map(given.get, _KEY_HEADERS)))
            if key is not None:
                request.key = key.share
            if not rights.is_open:
                self._keys.check(key, controls=rights.controls)
        if self._restrictions and (restriction := self._restrictions.get(rights.part or "")):
            _check_restriction(restriction, given)
        if key is not None and rights.part == "inference" and method == "POST":
            self._keys.admit(request, key)

    def _check_origin(self, given: dict[bytes, bytes], *, method: str) -> None:
        """Raise the error of a request that breaks rule 1, 2 or 3."""
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
            content_type = _content_type(given).decode()
            raise UnsupportedMediaType(
                f"the content type {content_type} is not accepted, because any web page can send it",
                remedy="send the header `Content-Type: application/json`",
            )

    def _is_foreign(self, given: dict[bytes, bytes], *, method: str) -> bool:
        """Whether a browser sends this for a page of another origin; as Go's net/http.CrossOriginProtection.

        Browsers send `Sec-Fetch-Site` to loopback and over TLS, and `Origin` with all methods except GET
        and HEAD.
        """
        origin, site = given.get(b"origin"), given.get(b"sec-fetch-site")
        if origin is not None and (origin in self._origins or b"*" in self._origins):
            return False
        if site is not None:
            # Links from other sites are allowed, as the linking page cannot read the answer.
            mode, destination = given.get(b"sec-fetch-mode"), given.get(b"sec-fetch-dest")
            is_link = method in _SAFE_METHODS and mode == b"navigate" and destination == b"document"
            return site not in (b"same-origin", b"none") and not is_link
        if origin is None:
            return False
        scheme, _, place = origin.partition(b"://")
        port = _DEFAULT_PORTS.get(scheme, b"")
        return place.removesuffix(port) != given.get(b"host", b"").lower().removesuffix(port)


def credentials(authorization: bytes | None, *own: bytes | None) -> list[bytes]:
    """Return the values that may be an API key.

    Args:
        authorization: the header of this name; its scheme is case-insensitive (RFC 9110, section 11.1).
        own: the headers that clients have for a key alone.
    """
    found = []
    if authorization is not None:
        scheme, _, value = authorization.strip().partition(b" ")
        if scheme.lower() == b"bearer":
            found.append(value.strip())
    return found + [value.strip() for value in own if value is not None]


def _host_pattern(text: str) -> str:
    """Return a value of `--allowed-host` in lower case; raises GenserveError if it cannot match a host."""
    if not text or not set(text.lower()) <= _HOST_CHARACTERS:
        raise GenserveError(
            f"--allowed-host {text!r} is not a host name",
            remedy="write the name without scheme and port: models.example",
        )
    return text.lower()


def _origin(text: str) -> bytes:
    """Return a value of `--allowed-origin` as browsers send it; raises GenserveError if it is no origin."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise GenserveError(
            f"--allowed-origin {text!r} is not an origin",
            remedy="write scheme and host, without a slash at the end: https://app.example, http://localhost:3000",
        )
    return text.lower().encode()


def _is_known(host: bytes, *, names: frozenset[str], single_labels: bool) -> bool:
    """Whether a Host header is an address, `localhost`, or matches one of `names`.

    An address cannot be rebound: a page that was loaded from it is a page of this server. With
    `single_labels`, names without a dot are accepted too, as containers have them on their network: the
    public DNS has none, and another container reaches the port without a web page anyway.
    """
    text = host.decode("latin-1").lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    name = name.rstrip(".")
    return (
        name == "localhost"
        or name.endswith(".localhost")  # RFC 6761, section 6.3: never resolved by a name server
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
        remedy=f"start it with --allowed-host {readable} if clients, or a proxy, use this name",
    )


def _is_form(given: dict[bytes, bytes]) -> bool:
    content_type = _content_type(given)
    if content_type == _FORM and given.get(b"user-agent", b"").startswith(_CURL):
        return False
    return content_type in _FORM_TYPES


def _content_type(given: dict[bytes, bytes]) -> bytes:
    return given.get(b"content-type", _JSON).partition(b";")[0].strip().lower()


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address; a name is resolved, and all of its addresses must be."""
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
    """Reject ports that other machines can reach without a key, unless the settings allow that.

    Raises:
        GenserveError: names the flags.
    """
    is_closed = settings.api_key or settings.api_key_file or settings.ssl_ca_certs
    if is_closed or settings.allow_unauthenticated:
        return
    ports = {"--host": settings.host}
    if settings.allow_grpc and settings.grpc_host:
        ports["--grpc-address"] = settings.grpc_host
    if settings.allow_metrics and settings.metrics_host and not settings.allow_unauthenticated_metrics:
        ports["--metrics-address"] = settings.metrics_host
    for flag, host in ports.items():
        if not is_loopback(host):
            raise GenserveError(
                f"{flag} {host} lets other machines connect, and no API key is set",
                remedy="set GENSERVE_API_KEY or --api-key-file, listen on 127.0.0.1, or let anybody "
                "connect with --allow-unauthenticated (GENSERVE_ALLOW_UNAUTHENTICATED=true in a container)",
            )
