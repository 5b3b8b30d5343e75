from __future__ import annotations

import io
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from genserve.server.observe import log_writer
from genserve.server.observe.log_writer import LogWriter, open_log
from tests.support.live_server import wait_until


def record(message: str) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": message, "name": "genserve.x"})


class Gate:
    """A destination that blocks until a line may be written, or fails."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.error: OSError | None = None
        self.taking = threading.Semaphore(0)
        self.open = threading.Event()

    def write(self, line: bytes) -> None:
        self.taking.release()
        assert self.open.wait(60)
        if self.error:
            raise self.error
        self.lines += line.decode().splitlines()

    def close(self) -> None:
        self.lines.append("closed")


def test_a_moved_log_file_is_reopened(tmp_path: Path) -> None:
    file = tmp_path / "log"
    handler = open_log(str(file))
    handler.handle(record("before"))
    wait_until(file.read_text)
    file.rename(tmp_path / "log.1")
    handler.handle(record("after"))
    handler.close()
    assert [(tmp_path / name).read_text() for name in ("log.1", "log")] == ["before\n", "after\n"]


def test_a_log_whose_folder_is_gone_for_a_while_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "log"
    file.parent.mkdir()
    handler = open_log(str(file))
    file.parent.rename(tmp_path / "moved")
    for number in range(2):
        handler.handle(record(str(number)))
        wait_until(lambda number=number: handler._num_dropped == number + 1)
    file.parent.mkdir()
    handler.handle(record("again"))
    handler.close()
    assert file.read_text() == "2 lines of the log could not be written\nagain\n"


def test_a_log_file_is_appended_to(tmp_path: Path) -> None:
    for word in ("first", "second"):
        handler = open_log(str(tmp_path / "log"))
        handler.handle(record(word))
        handler.close()
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_lines_that_find_no_place_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "_MAX_WAITING", 2)
    gate = Gate()
    handler = LogWriter(gate)
    handler.handle(record("0"))
    gate.taking.acquire()
    for number in range(1, 6):
        handler.handle(record(str(number)))     # does not wait
    gate.open.set()
    handler.close()
    assert gate.lines == ["0", "3 lines of the log could not be written", "1", "2", "closed"]


def test_lines_that_a_full_disk_rejects_are_counted() -> None:
    gate = Gate()
    gate.open.set()
    gate.error = OSError(28, "No space left on device")
    handler = LogWriter(gate)
    for number in range(3):
        handler.handle(record(str(number)))
        gate.taking.acquire()
    wait_until(lambda: handler._num_dropped == 3)
    gate.error = None
    handler.handle(record("there is space"))
    handler.close()
    assert gate.lines == ["3 lines of the log could not be written", "there is space", "closed"]


def test_a_full_disk_leaves_no_part_of_a_line_behind(capfd: pytest.CaptureFixture[str]) -> None:
    handler = open_log("/dev/full")
    for _ in range(3):
        handler.handle(record("x"))
    handler.close()
    assert capfd.readouterr() == ("", "")


def test_a_pipe_that_nobody_reads_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        handler = open_log("")
        for _ in range(30):
            handler.handle(record("x" * 4096))
        handler.close()
        assert handler._thread.is_alive()
        num_lines = 0
        while num_lines < 30:
            num_lines += os.read(reader, 1 << 20).count(b"\n")
    os.close(reader)


@pytest.mark.parametrize("stream", [io.StringIO(), None], ids=["another stream", "closed"])
def test_stderr_may_be_something_else(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    handler = open_log("")
    handler.handle(record("x"))
    handler.close()
    assert stream is None or stream.getvalue() == "x\n"
