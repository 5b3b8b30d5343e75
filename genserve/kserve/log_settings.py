"""Log settings: what the server writes into its log, changed while it runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from genserve.errors import InferenceError, Status

__all__ = ["LOG_FORMATS", "LogSettings"]

# The format of a line and of its time, by Triton's names.
LOG_FORMATS = {
    "default": ("%(asctime)s %(levelname)s %(name)s: %(message)s", None),
    "ISO8601": ("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"),
}


class LogSettings:
    """The settings of one server, with Triton's names and defaults. Safe from any thread.

    They act on the logger `genserve`, from the start: the least severe class that is on decides what is
    written. A format acts on the handlers of the root logger, once it is asked for.
    """

    def __init__(self, *, verbose_level: int = 0) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {
            "log_file": "",
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": verbose_level,
            "log_format": "default",
        }
        _set_level(self._values)

    @property
    def values(self) -> dict[str, Any]:
        """All settings, by name, in Triton's order."""
        with self._lock:
            return dict(self._values)

    def update(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change settings and return all of them; unknown names are passed over, as Triton does.

        Args:
            changes: by name; each of the type that `values` has.

        Raises:
            InferenceError: the file (UNSUPPORTED), an unknown format (UNAVAILABLE). Nothing was changed.
        """
        if "log_file" in changes:
            text = "log file location can not be updated through network protocol"
            raise InferenceError(text, status=Status.UNSUPPORTED)
        wanted = changes.get("log_format", "default")
        if wanted not in LOG_FORMATS:
            raise InferenceError(
                f"invalid argument for --log_format, got: {wanted}",
                status=Status.UNAVAILABLE,
                remedy=f"one of: {', '.join(LOG_FORMATS)}",
            )
        with self._lock:
            self._values |= {name: value for name, value in changes.items() if name in self._values}
            _set_level(self._values)
            if "log_format" in changes:
                _set_format(wanted)
            return dict(self._values)


def _set_level(values: Mapping[str, Any]) -> None:
    logging.getLogger("genserve").setLevel(_level(values))


def _set_format(name: str) -> None:
    formatter = logging.Formatter(*LOG_FORMATS[name])
    if name == "ISO8601":
        formatter.converter = time.gmtime  # which is what its Z says
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)


def _level(values: Mapping[str, Any]) -> int:
    if values["log_verbose_level"]:
        return logging.DEBUG
    if values["log_info"]:
        return logging.INFO
    if values["log_warning"]:
        return logging.WARNING
    return logging.ERROR if values["log_error"] else logging.CRITICAL + 1
