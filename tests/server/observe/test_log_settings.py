from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genserve.errors import GenserveError, InferenceError
from genserve.server.observe.access_log import audit
from genserve.server.observe.log_settings import LogSettings
from genserve.settings import ServerSettings


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    logger = logging.getLogger("genserve")
    level = logger.level
    yield
    logger.setLevel(level)


def log_settings(**settings: Any) -> LogSettings:
    return LogSettings(ServerSettings(**settings))


def log_one_of_each() -> None:
    logger = logging.getLogger("genserve.some.module")
    for word in ("debug", "info", "warning", "error", "critical"):
        getattr(logger, word)(f"a line: {word}")


ALL = ["debug", "info", "warning", "error", "critical"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ALL[1:]),
        ({"log_verbose_level": 1}, ALL),
        ({"log_info": False}, ALL[2:]),
        ({"log_warning": False}, ["info", "error", "critical"]),
        ({"log_error": False}, ["info", "warning"]),
        ({"log_verbose_level": 2, "log_info": False, "log_error": False}, ["debug", "warning"]),
        ({"log_info": False, "log_warning": False, "log_error": False}, []),
    ],
)
@pytest.mark.parametrize("from_start", [True, False])
def test_each_level_is_switched_separately(
    tmp_path: Path, changes: dict[str, object], words: list[str], from_start: bool
) -> None:
    file = tmp_path / "log"
    flags = {name.replace("verbose_level", "verbose"): value for name, value in changes.items()}
    settings = log_settings(log_file=file, **(flags if from_start else {}))
    with settings.written():
        if not from_start:
            assert settings.update(changes).items() >= changes.items()
        log_one_of_each()
    assert settings.values.items() >= changes.items()
    lines = file.read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == words


def test_the_audit_log_cannot_be_switched_off(tmp_path: Path) -> None:
    file = tmp_path / "log"
    settings = log_settings(log_file=file)
    with settings.written():
        settings.update({"log_info": False, "log_warning": False, "log_error": False})
        log_one_of_each()
        audit.info("who changed it")
        audit.warning("who tried to")
    first, second = file.read_text().splitlines()
    assert first.endswith("INFO genserve.audit: who changed it")
    assert second.endswith("WARNING genserve.audit: who tried to")


def test_settings_begin_with_those_of_the_server(tmp_path: Path) -> None:
    settings = log_settings(log_file=tmp_path / "log", log_format="ISO8601", log_warning=False, log_verbose=3)
    assert settings.values == {
        "log_file": "log",
        "log_info": True,
        "log_warning": False,
        "log_error": True,
        "log_verbose_level": 3,
        "log_format": "ISO8601",
    }


def test_a_new_format_applies_to_later_lines(tmp_path: Path) -> None:
    file = tmp_path / "log"
    settings = log_settings(log_file=file)
    with settings.written():
        logging.getLogger("genserve").info("first")
        settings.update({"log_format": "ISO8601"})
        logging.getLogger("genserve").info("second")
    first, second = file.read_text().splitlines()
    assert "T" not in first.split("INFO")[0]
    assert second.split()[0][10::13] == "TZ"        # 2026-01-01T00:00:00.000Z


def test_nothing_is_written_after_the_context(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with log_settings(log_file=file).written():
        pass
    logging.getLogger("genserve").error("too late")
    assert file.read_text() == ""


@pytest.mark.parametrize("place", ["missing/log", ""])
def test_an_unwritable_file_is_an_error_with_the_flag(tmp_path: Path, place: str) -> None:
    settings = log_settings(log_file=tmp_path / place)
    with pytest.raises(GenserveError, match="--log-file"), settings.written():
        pass


def test_an_unknown_format_is_an_error_with_the_flag() -> None:
    with pytest.raises(GenserveError, match="--log-format"):
        log_settings(log_format="xml")


def test_unknown_names_change_nothing() -> None:
    assert log_settings().update({"colour": "red"}) == log_settings().values


@pytest.mark.parametrize("changes", [{"log_format": "xml"}, {"log_file": "/tmp/x"}])
def test_an_invalid_change_is_rejected_and_changes_nothing(changes: dict[str, object]) -> None:
    settings = log_settings()
    with pytest.raises(InferenceError):
        settings.update({"log_info": False, **changes})
    assert settings.values["log_info"] is True
