from __future__ import annotations

import gc
import io
import logging
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.errors import InvalidRequest
from genserve.log import FloodFilter, LineFormatter, escaped, quoted
from genserve.request_context import CURRENT_REQUEST, RequestContext, current_request


def record(message: str, *arguments: object, **more: Any) -> logging.LogRecord:
    fields = {"name": "genserve.x", "levelno": logging.WARNING, "levelname": "WARNING", **more}
    return logging.makeLogRecord({"msg": message, "args": arguments, **fields})


@given(st.text())
def test_any_message_is_one_line_without_control_characters(text: str) -> None:
    line = LineFormatter("default").format(record("%s", text))
    assert len(line.splitlines()) == 1
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in line)
    line.encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\r\x1b[2J\x00", r"a\nb\r\x1b[2J\x00"),
        ("\x85\x9b\u2028\u2029", r"\x85\x9b\u2028\u2029"),
        ("\u202etxt.exe", r"\u202etxt.exe"),        # which would be shown backwards
        ("\udcff", r"\udcff"),
        ("größer, 大きい", "größer, 大きい"),
        (r"\d+", r"\d+"),
    ],
)
def test_special_characters_are_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_a_very_long_line_is_truncated_and_says_by_how_much() -> None:
    assert escaped("x" * 40_000).endswith("x... (7232 more characters)")


def test_a_traceback_follows_in_indented_lines_and_cannot_begin_one() -> None:
    try:
        raise ValueError("first\n2026-01-01 00:00:00,000 INFO forged: \x1b[2J")
    except ValueError:
        text = LineFormatter("default").format(record("it failed", exc_info=sys.exc_info()))
    first, *others = text.split("\n")
    assert first.endswith("WARNING genserve.x: it failed")
    assert all(line.startswith("    ") for line in others)
    assert others[-2:] == ["    ValueError: first", r"    2026-01-01 00:00:00,000 INFO forged: \x1b[2J"]


def test_iso8601_times_are_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    line = LineFormatter("ISO8601").format(record("x", created=0.0, msecs=0.0))
    assert line == "1970-01-01T00:00:00.000Z WARNING genserve.x: x"
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("smollm2", "smollm2"),
        ("/v2/models/a:1", "/v2/models/a:1"),
        ("", '""'),
        ("a 200 error=x", '"a 200 error=x"'),
        ('a"b', r'"a\"b"'),
        ("x" * 300, '"' + "x" * 256 + '..."'),
    ],
)
def test_a_text_of_a_client_is_one_field(text: str, shown: str) -> None:
    assert quoted(text) == shown


def test_lines_begin_with_their_request_id() -> None:
    token = CURRENT_REQUEST.set(RequestContext(id="mine-1"))
    try:
        assert LineFormatter("default").format(record("x")).endswith("genserve.x: [mine-1] x")
        error = InvalidRequest("no")
        current_request().fail(error)
        current = CURRENT_REQUEST.get()
        assert current is not None
        assert current.error is error
    finally:
        CURRENT_REQUEST.reset(token)
    assert LineFormatter("default").format(record("x")).endswith("genserve.x: x")
    current_request().fail(InvalidRequest("nobody's"))


class Tensor:
    """Something large that a frame holds."""


class Crossing(logging.Handler):
    """A handler whose first write logs another line, once enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.in_write, self.may_log = threading.Event(), threading.Event()

    def emit(self, written: logging.LogRecord) -> None:
        if written.msg == "logs while it is written":
            self.in_write.set()
            self.may_log.wait(timeout=30)
            self.filter(record("bad %d", 1, created=2000.0))


class TestFlood:
    """A client that is rejected over and over does not fill the disk."""

    def written(self, *records: logging.LogRecord) -> list[str]:
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(message)s"))
        flood = FloodFilter(handler)
        handler.addFilter(flood)
        for one in records:
            handler.handle(one)
        flood.close()
        return stream.getvalue().splitlines()

    def test_records_of_one_kind_beyond_the_limit_are_counted(self) -> None:
        lines = self.written(*(record("bad %d", n, created=1000.0) for n in range(150)))
        assert lines[:100] == [f"bad {n}" for n in range(100)]
        assert lines[100:] == ["50 more like this within 10 s, the last: bad 149"]

    def test_the_count_is_written_before_the_next_interval(self) -> None:
        records = [record("bad %d", n, created=1000.0) for n in range(101)]
        lines = self.written(*records, record("bad %d", 101, created=1010.0))
        assert lines[100:] == ["1 more like this within 10 s, the last: bad 100", "bad 101"]

    def test_other_kinds_are_not_held_back(self) -> None:
        records = [record("%s", n, kind="401", created=1000.0) for n in range(101)]
        lines = self.written(*records, record("%s", "x", kind="503", created=1000.0))
        assert lines[-2:] == ["x", "1 more like this within 10 s, the last: 100"]

    def test_a_log_call_during_a_write_does_not_deadlock(self) -> None:
        """As a garbage collection does, which runs in any thread and logs its finds."""
        handler = Crossing()
        flood = FloodFilter(handler)
        handler.addFilter(flood)
        for number in range(150):
            handler.handle(record("bad %d", number, created=1000.0))
        with ThreadPoolExecutor(2) as pool:
            writing = pool.submit(handler.handle, record("logs while it is written", created=1001.0))
            handler.in_write.wait(timeout=30)
            telling = pool.submit(handler.handle, record("next stretch", created=2000.0))
            handler.may_log.set()
            writing.result(timeout=30)
            telling.result(timeout=30)

    def test_dropped_records_keep_no_traceback(self) -> None:
        handler = logging.StreamHandler(io.StringIO())
        flood = FloodFilter(handler)
        handler.addFilter(flood)
        tensor = Tensor()
        seen = weakref.ref(tensor)
        for _ in range(101):
            try:
                raise ValueError(tensor)
            except ValueError:
                handler.handle(record("bad", created=1000.0, exc_info=sys.exc_info()))
        del tensor
        gc.collect()
        assert seen() is None

    def test_info_records_and_those_of_models_always_pass(self) -> None:
        info = {"levelno": logging.INFO, "created": 1000.0}
        models = {"name": "genserve.models.m", "created": 1000.0}
        assert len(self.written(*(record("x", **info) for _ in range(150)))) == 150
        assert len(self.written(*(record("x", **models) for _ in range(150)))) == 150
