"""Key ring: the named API keys of a server, from the environment and from a file that may change."""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
import time
import tomllib
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from genserve.client_credentials import require_header_value
from genserve.errors import ControlForbidden, GenserveError, Unauthenticated, suggestion
from genserve.request_context import KeyShare, RequestContext
from genserve.server.access.key_usage import KeyLimits, KeyUsage
from genserve.settings import ServerSettings

logger = logging.getLogger(__name__)

# The names of the keys from the environment.
_API_KEY, _CONTROL_KEY = "GENSERVE_API_KEY", "GENSERVE_CONTROL_KEY"
# A name is a word of the log. Names of the environment's keys are reserved.
_NAME = re.compile(r"(?!GENSERVE_)[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_LIMITS = tuple(KeyLimits.__dataclass_fields__)
_FIELDS = ("key", "sha256", "control", "weight", *_LIMITS)
_MAX_WEIGHT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedKey:
    """An API key, without its value."""

    share: KeyShare
    digest: bytes = field(repr=False)       # SHA-256
    may_control: bool                       # call routes that change the server
    limits: KeyLimits

    @property
    def name(self) -> str:
        """Its name, as the log shows it."""
        return self.share.name


# The key of the request that the code runs for; None: it has none.
CURRENT_KEY: ContextVar[NamedKey | None] = ContextVar("current_key", default=None)


class KeyRing:
    """The keys of one server, and what each of them has used.

    `find` and `reload` are safe from any thread; the rest is for the event loop.

    Attributes:
        has_keys: whether there are any, which does not change.
        is_required: whether requests need a key.
        control_is_restricted: whether requests without a key may not change the server, even if no key is
            required.
        usages: the usage of each key, by the name of the key; keys without requests so far are missing.
    """

    def __init__(self, settings: ServerSettings) -> None:
        """Read the keys.

        Raises:
            GenserveError: no header can hold a key, or the file cannot be used; it names no value.
        """
        self._file = settings.api_key_file
        self._of_environment: list[NamedKey] = []
        if settings.api_key:
            may_control = settings.control_key is None
            self._of_environment.append(_named(_API_KEY, settings.api_key, may_control=may_control))
        if settings.control_key:
            self._of_environment.append(_named(_CONTROL_KEY, settings.control_key, may_control=True))
        self.has_keys = bool(self._of_environment or self._file)
        self.is_required = bool(settings.api_key or self._file)
        self.control_is_restricted = self.is_required or settings.control_key is not None
        self._is_exposed = False        # other users can read keys in the file
        self._keys = self._read()
        self.usages: dict[str, KeyUsage] = {}

    def find(self, candidates: Iterable[bytes]) -> NamedKey | None:
        """Return the key that one of these values is; None: none is one.

        Compares the hashes of the values with those of all keys in constant time, so that the time says
        nothing about the keys.
        """
        found = None
        digests = [sha256(candidate).digest() for candidate in candidates]
        for key in self._keys:
            for digest in digests:
                if hmac.compare_digest(digest, key.digest):
                    found = key
        return found

    def check(self, key: NamedKey | None, *, controls: bool) -> None:
        """Reject a request.

        Args:
            key: the request's key; None: it has none, or a wrong one.
            controls: whether the request changes the server.

        Raises:
            Unauthenticated: it needs a key.
            ControlForbidden: its key may not control the server.
        """
        if key is None and (self.is_required or (controls and self.control_is_restricted)):
            raise Unauthenticated(
                "the API key is missing or wrong", remedy="send the header `Authorization: Bearer KEY`"
            )
        if key is not None and controls and not key.may_control:
            raise ControlForbidden(
                "this API key may not change the server",
                remedy="use the server's GENSERVE_CONTROL_KEY, or a key with `control = true` in its file",
            )

    def admit(self, request: RequestContext, key: NamedKey | None) -> None:
        """Count a request of a key, by its limits; call `end` when it has ended.

        Raises:
            RateLimited: it exceeds a limit.
        """
        if key is None:
            return
        usage = self.usages.get(key.name)
        if usage is None:
            usage = self.usages[key.name] = KeyUsage(key.limits, clock=time.monotonic)
        usage.change(key.limits)
        usage.admit(request)

    def end(self, request: RequestContext) -> None:
        """Count the tokens of a request; does nothing for one that is not counted."""
        usage = self.usages.get(request.key.name)
        if usage is not None:
            usage.end(request)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files whose change calls for `reload`."""
        return (self._file,) if self._file else ()

    def reload(self) -> None:
        """Read the file again. If that fails, log why and keep the keys."""
        try:
            self._keys = self._read()
        except GenserveError as error:
            logger.error("the API keys are unchanged: %s", error)    # noqa: TRY400  # not a bug
        else:
            self.report()

    def report(self) -> None:
        """Log the names of the keys in the file, and a warning if others can read them."""
        if self._file is None:
            return
        names = (key.name + (" (control)" if key.may_control else "") for key in self._keys)
        logger.info("API keys: %s", ", ".join(names))
        if self._is_exposed:
            logger.warning(
                "other users can read the API keys in %s: `chmod 600` it, or replace `key` by `sha256`",
                self._file,
            )

    def _read(self) -> tuple[NamedKey, ...]:
        keys = list(self._of_environment)
        if self._file is not None:
            tables, mode = _read_tables(self._file)
            where = f"--api-key-file {self._file}"
            keys += [_key(name, table, where=f"{where}: [{name!a}]") for name, table in tables.items()]
            self._is_exposed = bool(mode & stat.S_IROTH) and any("key" in table for table in tables.values())
        names: dict[bytes, str] = {}
        for key in keys:
            other = names.setdefault(key.digest, key.name)
            if other != key.name:
                raise GenserveError(
                    f"the API keys {other} and {key.name} are the same",
                    field=key.name,
                    remedy="give each a key of its own: openssl rand -hex 32",
                )
        return tuple(keys)


def _named(name: str, value: str, *, may_control: bool) -> NamedKey:
    require_header_value(value)
    digest = sha256(value.encode()).digest()
    return NamedKey(share=KeyShare(name), digest=digest, may_control=may_control, limits=KeyLimits())


def _read_tables(path: Path) -> tuple[dict[str, Any], int]:
    """Return the tables of a file of keys, and its mode; raises GenserveError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read()
    except OSError as error:
        raise GenserveError(
            f"--api-key-file {path} cannot be read: {error.strerror}",
            remedy="name a file in TOML format that this user may read",
        ) from error
    if stat.S_ISREG(mode) and mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise GenserveError(
            f"--api-key-file {path} can be written by other users", remedy=f"chmod 600 {path}"
        )
    try:
        tables = tomllib.loads(content.decode())
    except ValueError as error:     # not TOML, or not UTF-8; quotes neither
        reason = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "it is not UTF-8"
        raise GenserveError(f"--api-key-file {path} is not TOML: {reason}") from None
    if not tables:
        raise GenserveError(f"--api-key-file {path} has no key", remedy="add a table for each: [NAME]")
    return tables, mode


def _key(name: str, table: Any, *, where: str) -> NamedKey:
    """Return the key of a table; raises GenserveError, which quotes no value."""
    if not _NAME.fullmatch(name):
        rule = "1 to 64 letters, digits and . _ @ -, not beginning with GENSERVE_"
        raise GenserveError(f"{where} is not a name of a key", field=name, remedy=f"use {rule}")
    if not isinstance(table, dict):
        remedy = f'write [{name}], and below it: key = "KEY"'
        raise GenserveError(f"{where} is not a table", field=name, remedy=remedy)
    for given in table:
        if given not in _FIELDS:
            raise GenserveError(
                f"{where} has the unknown field {given!a}",
                field=f"{name}.{given}",
                remedy=suggestion(given, known=_FIELDS),
            )
    values = [table[each] for each in ("key", "sha256") if each in table]
    if len(values) != 1 or not isinstance(values[0], str):
        problem = "needs a text as `key` or as `sha256`, and not both"
        raise GenserveError(f"{where} {problem}", field=f"{name}.key")
    control = table.get("control", False)
    if not isinstance(control, bool):
        raise GenserveError(f"{where}: control is neither true nor false", field=f"{name}.control")
    limits = {limit: table[limit] for limit in _LIMITS if limit in table}
    for limit, number in limits.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise GenserveError(f"{where}: {limit} is not a whole number above 0", field=f"{name}.{limit}")
    weight = table.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= _MAX_WEIGHT:
        problem = f"weight is not a number above 0, and at most {_MAX_WEIGHT}"
        raise GenserveError(f"{where}: {problem}", field=f"{name}.weight")
    return NamedKey(
        share=KeyShare(name, float(weight)),
        digest=_digest(name, table, where=where),
        may_control=control,
        limits=KeyLimits(**limits),
    )


def _digest(name: str, table: dict[str, str], *, where: str) -> bytes:
    if "key" in table:
        try:
            require_header_value(table["key"])
        except GenserveError as error:
            raise GenserveError(
                f"{where}: {error.message}", field=f"{name}.key", remedy=error.remedy
            ) from None
        return sha256(table["key"].encode()).digest()
    if not _SHA256.fullmatch(table["sha256"]):
        raise GenserveError(
            f"{where}: sha256 does not have 64 hexadecimal digits",
            field=f"{name}.sha256",
            remedy="printf %s KEY | sha256sum",
        )
    return bytes.fromhex(table["sha256"])
