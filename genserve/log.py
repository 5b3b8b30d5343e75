"""Log: the format of the server's log, and the limit of its warnings."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy

from genserve.request_context import current_request

# The logger of requests that change the server; see `access_log`.
AUDIT = "genserve.audit"

# The format of a line and of its time, by Triton's names.
LOG_FORMATS = {
    "default": ("%(asctime)s %(levelname)s %(name)s: %(message)s", None),
    "ISO8601": ("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"),
}

# Characters that begin a line, control a terminal, change the text direction, or are not valid in UTF-8.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MAX_LINE = 32768       # characters
_WORD = re.compile(r"[\w.:/@+\-%?&=,~!*()]+", re.ASCII)

# The most lines of one kind of warning or error that are written per interval.
_MAX_ALIKE = 100
_INTERVAL_S = 10


@contextmanager
def at_level(name: str, level: int) -> Iterator[None]:
    """Let a logger write only lines of this level and above, for as long as the block runs."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def escaped(text: str) -> str:
    r"""Return a text as one line, with control characters escaped as in Python (`\n`, `\x1b`)."""
    if len(text) > _MAX_LINE:
        text = f"{text[:_MAX_LINE]}... ({len(text) - _MAX_LINE} more characters)"
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def quoted(text: str, *, limit: int = 256) -> str:
    """Return a text of a client as one field: a word as it is, any other text truncated and in quotes."""
    if _WORD.fullmatch(text) and len(text) <= limit:
        return text
    cut = text if len(text) <= limit else f"{text[:limit]}..."
    return '"' + cut.replace("\\", "\\\\").replace('"', '\\"') + '"'


class LineFormatter(logging.Formatter):
    """Formats each record as one line, even if its text has line ends.

    The message begins with the request id. A traceback follows in indented lines; no record is indented.
    """

    def __init__(self, log_format: str) -> None:
        """Take one of `LOG_FORMATS`."""
        super().__init__(*LOG_FORMATS[log_format])
        if log_format == "ISO8601":
            self.converter = time.gmtime  # the Z at its end means UTC

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and those of a traceback, without the last line feed."""
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
    """Passes at most 100 warnings or errors of one kind per 10 seconds, and logs how many were dropped.

    So a client cannot fill the disk with rejected requests. The kind of a record is its attribute `kind`, or
    its message before the arguments are formatted. Records that models log themselves always pass.
    """

    def __init__(self, handler: logging.Handler) -> None:
        """Filter for a handler, which also writes the counts."""
        super().__init__()
        self._handler = handler
        # Reentrant, since a garbage collection in here may log. The handler's lock is never taken while it is
        # held: a thread that holds that lock may wait for this one.
        self._lock = threading.RLock()
        self._began_s = 0.0
        self._counts: dict[tuple[str, str], int] = {}
        self._dropped: dict[tuple[str, str], logging.LogRecord] = {}        # the last one of each kind

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a record."""
        if record.levelno < logging.WARNING or record.name.startswith("genserve.models"):
            return True
        kind = (record.name, str(getattr(record, "kind", record.msg)))
        summaries: list[logging.LogRecord] = []
        with self._lock:
            # A clock that was set back begins a new interval too.
            if not 0 <= record.created - self._began_s < _INTERVAL_S:
                summaries = self._take_summaries()
                self._began_s = record.created
            count = self._counts[kind] = self._counts.get(kind, 0) + 1
            is_written = count <= _MAX_ALIKE
            if not is_written:
                self._dropped[kind] = _without_traceback(record)
        self._write(summaries)
        return is_written

    def close(self) -> None:
        """Write the counts of the last interval."""
        with self._lock:
            summaries = self._take_summaries()
        self._write(summaries)

    def _take_summaries(self) -> list[logging.LogRecord]:
        """Return a record for each kind that was dropped, and reset the counts."""
        summaries = list(self._dropped.values())
        for kind, last in self._dropped.items():
            count = self._counts[kind] - _MAX_ALIKE
            last.msg = f"{count} more like this within {_INTERVAL_S} s, the last: {last.msg}"
        self._counts, self._dropped = {}, {}
        return summaries

    def _write(self, records: Sequence[logging.LogRecord]) -> None:
        for record in records:
            self._handler.acquire()
            try:
                self._handler.emit(record)
            finally:
                self._handler.release()


def _without_traceback(record: logging.LogRecord) -> logging.LogRecord:
    """Return a copy without the traceback, which would keep the variables of its frames alive."""
    bare = copy(record)
    bare.msg, bare.args = record.getMessage(), ()
    bare.exc_info = bare.exc_text = bare.stack_info = None
    bare.request_id = _request_id(record)       # the current request's, whenever the record is written
    return bare


def _request_id(record: logging.LogRecord) -> str:
    known: str | None = getattr(record, "request_id", None)
    if known is not None:
        return known
    return current_request().id
