"""Log: the lines of the server's log, where they go, and which request each of them is about."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from logging.handlers import WatchedFileHandler
from typing import Protocol

from genserve.errors import GenserveError

__all__ = [
    "CURRENT_REQUEST",
    "LOG_FORMATS",
    "FloodFilter",
    "LineFormatter",
    "LoggedRequest",
    "escaped",
    "fail_request",
    "open_log",
    "quoted",
]

# The format of a line and of its time, by Triton's names.
LOG_FORMATS = {
    "default": ("%(asctime)s %(levelname)s %(name)s: %(message)s", None),
    "ISO8601": ("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"),
}

# What could begin a line, drive a terminal or turn the direction of a text, and what UTF-8 cannot have.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MAX_LINE = 32768       # characters
_WORD = re.compile(r"[\w.:/@+\-%?&=,~!*()]+", re.ASCII)

# Of one kind of warning or error so many lines are written in each stretch of time.
_MAX_ALIKE = 100
_STRETCH_S = 10


class LoggedAnswer(Protocol):
    """An answer that is generated: `TokenSequence`."""

    @property
    def num_new_tokens(self) -> int:
        """How many tokens it has so far."""

    @property
    def finish_reason(self) -> str | None:
        """How it ended; None: it has not."""

    @property
    def first_token_s(self) -> float | None:
        """When its first token was there, `time.monotonic()`; None: it has none."""


@dataclass(slots=True, kw_only=True, eq=False)
class LoggedRequest:
    """One request, as the log tells of it; whoever learns something of it writes it here.

    Attributes:
        id: its `X-Request-Id`, or the id of a KServe request; may be empty.
        started_s: when it came, `time.monotonic()`.
        model: that it asks for, as the client wrote it, or that was chosen.
        prompt_tokens: of all its prompts.
        answers: that are generated for it.
        error: what it was refused with, or failed with.
    """

    id: str
    started_s: float = field(default_factory=time.monotonic)
    model: str = ""
    prompt_tokens: int = 0
    answers: Sequence[LoggedAnswer] = ()
    error: GenserveError | None = None

    def ending(self) -> str:
        """Return how its answers ended, in the words of the metric `genserve_requests_total`."""
        if self.error is not None:
            return "failed"
        return ",".join(dict.fromkeys(answer.finish_reason or "cancelled" for answer in self.answers))

    def first_token_s(self) -> float | None:
        """Return after how many seconds its first token was there; None: it has none."""
        times = [answer.first_token_s for answer in self.answers if answer.first_token_s is not None]
        return min(times) - self.started_s if times else None


# The request that the code runs for. Tasks and worker threads inherit it; the threads of models serve many.
CURRENT_REQUEST: ContextVar[LoggedRequest | None] = ContextVar("current_request", default=None)


def fail_request(error: GenserveError) -> None:
    """Note what the current request, if there is one, is refused with or fails with."""
    request = CURRENT_REQUEST.get()
    if request is not None:
        request.error = error


def escaped(text: str) -> str:
    r"""Return a text as one line: what is no plain character is spelled as Python does (`\n`, `\x1b`)."""
    if len(text) > _MAX_LINE:
        text = f"{text[:_MAX_LINE]}... ({len(text) - _MAX_LINE} more characters)"
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def quoted(text: str, *, limit: int = 256) -> str:
    """Return a word as it is; any other text of a client cut and in quotes, so that it is one field."""
    if _WORD.fullmatch(text) and len(text) <= limit:
        return text
    cut = text if len(text) <= limit else f"{text[:limit]}..."
    return '"' + cut.replace("\\", "\\\\").replace('"', '\\"') + '"'


class LineFormatter(logging.Formatter):
    """Makes a line of each record, whoever wrote its text.

    The id of the request that it is about comes first in the message. A traceback follows in lines that
    begin with blanks, as no record does.
    """

    def __init__(self, log_format: str) -> None:
        """Take one of `LOG_FORMATS`."""
        super().__init__(*LOG_FORMATS[log_format])
        if log_format == "ISO8601":
            self.converter = time.gmtime  # which is what its Z says

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, or the lines, without the last line feed."""
        request_id = _request_id(record)
        prefix = f"[{quoted(request_id)}] " if request_id else ""
        record.message = prefix + record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        lines = [escaped(self.formatMessage(record))]
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        for text in (record.exc_text, record.stack_info):
            if text:
                lines += [f"    {escaped(line)}" for line in text.split("\n")]
        return "\n".join(lines)


class FloodFilter(logging.Filter):
    """Lets through 100 warnings or errors of a kind in 10 seconds, and tells how many more there were.

    So a client cannot fill a disk with what is refused. A kind is the attribute `kind` of a record, or the
    text of its message without what is put in. What models log themselves is let through.
    """

    def __init__(self, handler: logging.Handler) -> None:
        """Filter for a handler, which writes the counts too."""
        super().__init__()
        self._handler = handler
        # Reentrant, since a garbage collection in here may log. The handler's lock is never taken within it:
        # one in the middle of a write waits for this one.
        self._lock = threading.RLock()
        self._began_s = 0.0
        self._counts: dict[tuple[str, str], int] = {}
        self._left_out: dict[tuple[str, str], logging.LogRecord] = {}       # the last of each kind

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a record."""
        if record.levelno < logging.WARNING or record.name.startswith("genserve.models"):
            return True
        kind = (record.name, str(getattr(record, "kind", record.msg)))
        summaries: list[logging.LogRecord] = []
        with self._lock:
            # A clock that was set back begins a new stretch too.
            if not 0 <= record.created - self._began_s < _STRETCH_S:
                summaries = self._take_summaries()
                self._began_s = record.created
            count = self._counts[kind] = self._counts.get(kind, 0) + 1
            is_written = count <= _MAX_ALIKE
            if not is_written:
                self._left_out[kind] = _bare(record)
        self._write(summaries)
        return is_written

    def close(self) -> None:
        """Write what was counted."""
        with self._lock:
            summaries = self._take_summaries()
        self._write(summaries)

    def _take_summaries(self) -> list[logging.LogRecord]:
        """Return a line for each kind of which some were left out, and count anew."""
        summaries = list(self._left_out.values())
        for kind, last in self._left_out.items():
            count = self._counts[kind] - _MAX_ALIKE
            last.msg = f"{count} more like this within {_STRETCH_S} s, the last: {last.msg}"
        self._counts, self._left_out = {}, {}
        return summaries

    def _write(self, records: Sequence[logging.LogRecord]) -> None:
        for record in records:
            self._handler.acquire()
            try:
                self._handler.emit(record)
            finally:
                self._handler.release()


def _bare(record: logging.LogRecord) -> logging.LogRecord:
    """Return a record with its text alone: a traceback would keep what its frames hold."""
    bare = copy(record)
    bare.msg, bare.args = record.getMessage(), ()
    bare.exc_info = bare.exc_text = bare.stack_info = None
    bare.request_id = _request_id(record)       # of now, whenever it is written
    return bare


def open_log(path: str) -> logging.Handler:
    """Return a handler that writes to a file, or to stderr if `path` is empty.

    A file that is moved away, as logrotate does, is begun anew.

    Raises:
        GenserveError: the file cannot be written.
    """
    if not path:
        return logging.StreamHandler()
    try:
        return WatchedFileHandler(path, encoding="utf-8")
    except OSError as error:
        raise GenserveError(
            f"cannot write the log to {path}: {error.strerror}",
            remedy="give --log-file a file in a folder that is there and may be written",
        ) from error


def _request_id(record: logging.LogRecord) -> str:
    known: str | None = getattr(record, "request_id", None)
    if known is not None:
        return known
    request = CURRENT_REQUEST.get()
    return "" if request is None else request.id
