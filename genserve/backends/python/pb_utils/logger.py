"""Logger: what a model has to say goes into the server's log."""

from __future__ import annotations

import logging
from enum import IntEnum
from typing import ClassVar

from genserve.backends.python.host import current_host
from genserve.backends.python.pb_utils.text_argument import text_argument

__all__ = ["LogLevel", "Logger"]


class LogLevel(IntEnum):
    """Triton's levels."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LEVELS = {
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.VERBOSE: logging.DEBUG,
}


class Logger:
    """Logs by the name `genserve.models.<model>`; used as it is, without an instance."""

    INFO: ClassVar = LogLevel.INFO
    WARNING: ClassVar = LogLevel.WARNING
    ERROR: ClassVar = LogLevel.ERROR
    VERBOSE: ClassVar = LogLevel.VERBOSE

    @staticmethod
    def log(message: str | bytes, level: LogLevel = LogLevel.INFO) -> None:
        """Log a message at a level."""
        _log(message, level)

    @staticmethod
    def log_info(message: str | bytes) -> None:
        """Log at INFO."""
        _log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str | bytes) -> None:
        """Log at WARNING."""
        _log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str | bytes) -> None:
        """Log at ERROR."""
        _log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str | bytes) -> None:
        """Log at VERBOSE, which is shown only when asked for."""
        _log(message, LogLevel.VERBOSE)


def _log(message: str | bytes, level: LogLevel) -> None:
    text = text_argument(message, "a message")
    host = current_host()
    name = "genserve.models" if host is None else f"genserve.models.{host.model}"
    # The place to show is the line of the model that logs: two calls up.
    logging.getLogger(name).log(_LEVELS[level], "%s", text, stacklevel=3)
