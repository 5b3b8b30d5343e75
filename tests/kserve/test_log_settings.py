from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator

import pytest

from genserve.errors import InferenceError
from genserve.kserve.log_settings import LogSettings


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("genserve")
    handlers = {handler: handler.formatter for handler in logging.getLogger().handlers}
    level = logger.level
    yield logger
    logger.setLevel(level)
    for handler, formatter in handlers.items():
        handler.setFormatter(formatter)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({"log_verbose_level": 1}, logging.DEBUG),
        ({"log_info": True}, logging.INFO),
        ({"log_info": False}, logging.WARNING),
        ({"log_info": False, "log_warning": False}, logging.ERROR),
        ({"log_info": False, "log_warning": False, "log_error": False}, logging.CRITICAL + 1),
    ],
)
def test_the_least_severe_class_that_is_on_decides(logger, changes: dict[str, object], level: int) -> None:
    settings = LogSettings()
    assert settings.update(changes).items() >= changes.items()
    assert logger.getEffectiveLevel() == level


@pytest.mark.parametrize(("verbose", "level"), [(0, logging.INFO), (1, logging.DEBUG)])
def test_from_the_start_what_they_say_is_so(logger, verbose: int, level: int) -> None:
    logger.setLevel(logging.CRITICAL)
    settings = LogSettings(verbose_level=verbose)
    assert settings.values["log_info"]
    assert settings.values["log_verbose_level"] == verbose
    assert logger.getEffectiveLevel() == level


def test_iso_8601_is_universal_time(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    LogSettings().update({"log_format": "ISO8601"})
    record = logging.makeLogRecord({"created": 0.0, "msecs": 0.0, "msg": "x", "name": "n"})
    assert handler.format(record).startswith("1970-01-01T00:00:00.000Z ")
    monkeypatch.undo()
    time.tzset()


def test_unknown_names_change_nothing() -> None:
    assert LogSettings().update({"colour": "red"}) == LogSettings().values


@pytest.mark.parametrize("changes", [{"log_format": "xml"}, {"log_file": "/tmp/x"}])
def test_what_cannot_be_is_refused_and_nothing_is_changed(changes: dict[str, object]) -> None:
    settings = LogSettings()
    with pytest.raises(InferenceError):
        settings.update({"log_info": False, **changes})
    assert settings.values["log_info"] is True
