"""Log writer: writes the log on a thread of its own, so that a full pipe or a slow disk delays no request."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from logging.handlers import WatchedFileHandler
from queue import SimpleQueue
from typing import Protocol

from genserve.errors import GenserveError

# Lines that wait for a destination that does not take them; later ones are dropped and counted.
_MAX_WAITING = 4096
# What a destination that takes nothing costs the end of the process.
_CLOSE_TIMEOUT_S = 1.0
# A pipe that another process has made non-blocking is tried again after this time.
_RETRY_S = 0.05


class _Destination(Protocol):
    def write(self, line: bytes, /) -> None:
        """Write a line, as a whole; raises OSError."""

    def close(self) -> None:
        """Release it."""


class LogWriter(logging.Handler):
    """A handler that formats on the thread of the caller and writes on its own: `emit` never waits.

    Lines that cannot be written, since a disk is full or nobody reads a pipe, are dropped; their number
    precedes the next line that can.
    """

    def __init__(self, destination: _Destination) -> None:
        """Start the thread."""
        super().__init__()
        self._destination = destination
        self._lines: SimpleQueue[str | None] = SimpleQueue()     # None: the end
        self._num_dropped = 0       # by `emit`; the next line of this thread reports them
        self._dropping = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if self._lines.qsize() < _MAX_WAITING:
            self._lines.put(line)
        else:
            self._drop(1)

    def close(self) -> None:
        """Write the lines that wait, if the destination takes them within a second, and release it."""
        self._lines.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        super().close()

    def _drop(self, count: int) -> None:
        with self._dropping:
            self._num_dropped += count

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
        if self._num_dropped:
            self._write("the log ends")
        self._destination.close()

    def _write(self, line: str) -> None:
        with self._dropping:
            num_dropped, self._num_dropped = self._num_dropped, 0
        text = f"{line}\n"
        if num_dropped:
            text = f"{num_dropped} lines of the log could not be written\n{text}"
        try:
            self._destination.write(text.encode(errors="backslashreplace"))
        except OSError:
            self._drop(num_dropped + 1)


class _LogFile(WatchedFileHandler):
    """A file that is reopened when it has been moved, as logrotate does."""

    def _open(self) -> io.FileIO:   # type: ignore[override]  # without a buffer, which would keep failed lines
        return io.FileIO(self.baseFilename, "a")

    def write(self, line: bytes) -> None:
        self.reopenIfNeeded()
        if self.stream is None:     # the file could not be opened when it was looked for last
            self.stream = self._open()      # type: ignore[assignment]
            self._statstream()
        _write_all(self.stream, line)   # type: ignore[arg-type]


class _StandardError:
    """The process's stderr, or what a test has put in its place; a closed one takes everything."""

    def __init__(self) -> None:
        self._text = sys.stderr
        try:
            # Without a buffer, whose lock a thread that waits for a full pipe would hold to the end.
            self._raw = io.FileIO(self._text.fileno(), "w", closefd=False) if self._text else None
        except OSError:
            self._raw = None

    def write(self, line: bytes) -> None:
        if self._raw is not None:
            _write_all(self._raw, line)
        elif self._text is not None:
            self._text.write(line.decode())

    def close(self) -> None:
        """Leave it open: it is not the log's own."""


def _write_all(file: io.FileIO, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        num_written = file.write(rest)
        if num_written is None:
            time.sleep(_RETRY_S)
        else:
            rest = rest[num_written:]


def open_log(path: str) -> LogWriter:
    """Return a handler that writes to a file, or to stderr if `path` is empty.

    When the file is moved, as logrotate does, a new one is opened.

    Raises:
        GenserveError: the file cannot be written.
    """
    if not path:
        return LogWriter(_StandardError())
    try:
        return LogWriter(_LogFile(path))
    except OSError as error:
        raise GenserveError(
            f"cannot write the log to {path}: {error.strerror}",
            remedy="set --log-file to a file in an existing, writable folder",
        ) from error
