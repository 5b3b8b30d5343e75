"""Log settings: which lines the server logs, changeable while it runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from genserve.errors import GenserveError, InferenceError, Status
from genserve.log import AUDIT, LOG_FORMATS, FloodFilter, LineFormatter
from genserve.request_context import current_request
from genserve.server.observe.log_writer import open_log
from genserve.settings import ServerSettings


class LogSettings:
    """The settings of one server, with Triton's names. Safe from any thread.

    Errors, warnings and information are switched on and off separately; a verbose level above 0 adds
    everything else. The settings apply to the logger `genserve` from the start, and to all loggers within
    `written`.
    """

    def __init__(self, settings: ServerSettings) -> None:
        """Take the server's settings; raises GenserveError for an unknown log format."""
        if settings.log_format not in LOG_FORMATS:
            raise GenserveError(
                f"unknown log format {settings.log_format!r}",
                remedy=f"set --log-format to one of: {', '.join(LOG_FORMATS)}",
            )
        self._file = str(settings.log_file or "")
        self._lock = threading.Lock()
        self._handler: logging.Handler | None = None
        self._values: dict[str, Any] = {
            # Clients may neither change the file nor see its folder.
            "log_file": settings.log_file.name if settings.log_file else "",
            "log_info": settings.log_info,
            "log_warning": settings.log_warning,
            "log_error": settings.log_error,
            "log_verbose_level": settings.log_verbose,
            "log_format": settings.log_format,
        }
        self._apply()

    @property
    def values(self) -> dict[str, Any]:
        """All settings, by name, in Triton's order."""
        with self._lock:
            return dict(self._values)

    @contextmanager
    def written(self) -> Iterator[None]:
        """Write the lines of all loggers of the process to the log file, or to stderr without one.

        Raises:
            GenserveError: the file cannot be written.
        """
        handler = open_log(self._file)
        flood = FloodFilter(handler)
        handler.addFilter(self._is_on)
        handler.addFilter(flood)
        with self._lock:
            self._handler = handler
            self._apply()
        logging.getLogger().addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)
            flood.close()
            handler.close()

    def update(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change settings and return all of them; as in Triton, unknown names are ignored.

        Args:
            changes: the new values by the names of the settings, with the types of `values`.

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
        known = {name: value for name, value in changes.items() if name in self._values}
        current_request().change = ", ".join(f"{name}={value}" for name, value in known.items())
        with self._lock:
            self._values |= known
            self._apply()
            return dict(self._values)

    def _apply(self) -> None:
        levels = {
            logging.DEBUG: self._values["log_verbose_level"],
            logging.INFO: self._values["log_info"],
            logging.WARNING: self._values["log_warning"],
            logging.ERROR: self._values["log_error"],
        }
        # Lines below the lowest level are not even formatted; the handler drops a level between two others.
        lowest = min((level for level, is_on in levels.items() if is_on), default=logging.CRITICAL + 1)
        logging.getLogger("genserve").setLevel(lowest)
        if self._handler is not None:
            self._handler.setFormatter(LineFormatter(self._values["log_format"]))

    def _is_on(self, record: logging.LogRecord) -> bool:
        """Whether the level of a record is switched on, or it belongs to the audit log."""
        if record.name == AUDIT:
            return True
        if record.levelno >= logging.ERROR:
            name = "log_error"
        elif record.levelno >= logging.WARNING:
            name = "log_warning"
        else:
            name = "log_info" if record.levelno >= logging.INFO else "log_verbose_level"
        return bool(self._values[name])
