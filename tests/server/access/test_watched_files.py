from __future__ import annotations

import os
from pathlib import Path

import pytest

from genserve.server.access.watched_files import WatchedFiles, _Watch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("one")
    return path


def replace_by_rename(file: Path) -> None:
    new = file.with_name("new")
    new.write_text("two")
    new.replace(file)


def exchange_link(file: Path) -> None:
    new = file.with_name("new")
    new.write_text("one")
    link = file.with_name("link")
    link.symlink_to(new)
    link.replace(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_text("two"),
        lambda file: file.chmod(0o600),
        lambda file: os.utime(file, ns=(1, 1)),
        replace_by_rename,
        exchange_link,
        Path.unlink,
    ],
    ids=["rewritten", "other permissions", "touched", "renamed", "link", "deleted"],
)
def test_a_change_is_passed_on_once_when_it_is_complete(file, change):
    calls: list[str] = []
    watch = _Watch([file], lambda: calls.append(file.read_text() if file.exists() else ""))
    watch.look()
    change(file)
    watch.look()
    assert not calls
    watch.look()
    watch.look()
    assert len(calls) == 1


def test_files_that_still_change_are_left_alone(tmp_path):
    files = [tmp_path / "certificate", tmp_path / "key"]
    calls: list[int] = []
    watch = _Watch(files, lambda: calls.append(1))
    for path in files:
        path.write_text("x")
        watch.look()
        assert not calls
    watch.look()
    assert calls == [1]


def test_a_failure_does_not_end_the_watch(file, caplog):
    def fail() -> None:
        raise RuntimeError("no")

    watch = _Watch([file], fail)
    for text in ("two", "three words"):
        caplog.clear()
        file.write_text(text)
        watch.look()
        watch.look()
        assert "reloading" in caplog.text


def test_without_files_there_is_no_thread():
    watched = WatchedFiles()
    watched.add((), lambda: None)
    watched.start()
    assert not watched._thread.is_alive()
    watched.close()
