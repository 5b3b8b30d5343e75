from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from genserve.engine.block_files import BlockFiles, file_bytes, trim, whole_pages

ONE, OTHER = "1" * 32, "2" * 32


def key(number: int) -> bytes:
    return bytes([number]) * 32


def content(number: int, *, num_bytes: int = 64) -> np.ndarray:
    return np.random.default_rng(number).integers(256, size=num_bytes, dtype=np.uint8)


def opened(folder: Path, *, fingerprint: str = ONE, read_only: bool = False) -> BlockFiles:
    files = BlockFiles(folder, fingerprint=fingerprint, read_only=read_only)
    files.refresh()
    return files


def write(files: BlockFiles, *numbers: int) -> int:
    return files.write([key(number) for number in numbers], np.stack([content(n) for n in numbers]))


def read(files: BlockFiles, *numbers: int) -> list[int]:
    """Which blocks are read at once, with the right content."""
    rows = np.zeros((len(numbers), 64), np.uint8)
    num_read = files.read([key(number) for number in numbers], rows)
    for number, row in zip(numbers[:num_read], rows, strict=False):
        np.testing.assert_array_equal(row, content(number))
    return list(numbers[:num_read])


def file_of(folder: Path, *numbers: int) -> Path:
    """The file with just these blocks."""
    [path] = (
        path
        for path in folder.rglob("*.kv")
        if path.stat().st_size == file_bytes(len(numbers), 64)
        and all(key(number) in path.read_bytes() for number in numbers)
    )
    return path


def test_blocks_are_read_as_they_were_written(tmp_path):
    files = opened(tmp_path / "new")
    assert write(files, 1, 2, 3) == file_bytes(3, 64)
    assert write(files, 5) == file_bytes(1, 64)
    for known in (files, opened(tmp_path / "new")):
        assert read(known, 1, 2, 3, 5) == [1, 2, 3], "those of one file"
        assert read(known, 2, 3, 4) == [2, 3]
        assert read(known, 1, 3) == [1]
        assert read(known, 5) == [5]
        assert read(known, 4, 5) == []


def test_blocks_that_are_in_a_file_are_not_written_again(tmp_path):
    files = opened(tmp_path)
    write(files, 1, 2)
    assert write(files, 2, 1) == 0
    assert write(files, 0, 1, 2, 3) == file_bytes(2, 64)
    assert read(files, 0, 3) == [0, 3]


def test_files_of_another_process_are_found_and_missed(tmp_path):
    files, other = opened(tmp_path), opened(tmp_path)
    write(other, 1, 2)
    write(files, 3)
    write(other, 4)
    assert [key(number) in files for number in (1, 2, 3, 4)] == [False, False, True, False]
    files.refresh()
    assert [read(files, 1, 2), read(files, 3), read(files, 4)] == [[1, 2], [3], [4]]
    file_of(tmp_path, 1, 2).unlink()
    assert read(files, 1) == []
    file_of(tmp_path, 3).unlink()
    files.refresh()
    assert [key(number) in files for number in (1, 2, 3, 4)] == [False, False, False, True]
    assert write(files, 1, 2, 3) == file_bytes(3, 64)


def test_a_folder_is_listed_only_when_others_have_changed_it(tmp_path, monkeypatch):
    files, listed = opened(tmp_path), []
    write(files, 1)
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(folder) or [])
    write(files, 2)
    files.refresh()
    assert not listed
    write(opened(tmp_path), 3)
    listed.clear()
    files.refresh()
    assert len(listed) == 1


def test_a_change_that_the_time_of_the_folder_does_not_show_is_found_later(tmp_path, monkeypatch):
    """Two changes in one tick of the file system's clock leave the same time."""
    files, other = opened(tmp_path), opened(tmp_path)
    write(files, 1)
    changed_ns = (tmp_path / ONE).stat().st_mtime_ns
    files.refresh()
    write(other, 2)
    os.utime(tmp_path / ONE, ns=(changed_ns, changed_ns))
    later_s = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    files.refresh()
    assert read(files, 2) == [2]


def test_servers_that_compute_other_bits_keep_their_own_files(tmp_path):
    files, other = opened(tmp_path), opened(tmp_path)
    write(files, 1)
    other.write([key(1)], content(2)[np.newaxis])
    assert read(files, 1) == [1]


def test_a_damaged_file_that_another_process_writes_again_is_found(tmp_path):
    files = opened(tmp_path)
    write(files, 1)
    path = file_of(tmp_path, 1)
    written = path.read_bytes()
    path.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    assert read(files, 1) == []
    assert not path.exists()
    write(opened(tmp_path), 1)
    files.refresh()
    assert read(files, 1) == [1]


def test_a_file_that_cannot_be_read_is_reported_once(tmp_path, caplog):
    path = tmp_path / ONE / f"{key(1).hex()}.kv"
    path.mkdir(parents=True)
    files = opened(tmp_path)
    write(opened(tmp_path), 2)
    caplog.clear()
    files.refresh()
    assert read(files, 2) == [2]
    assert not caplog.records


def test_two_servers_write_the_same_blocks_at_once(tmp_path, monkeypatch):
    """In containers, both may have the same ids of process and thread."""
    os_writev = os.writev

    def write_after_another(descriptor, buffers):
        size = os_writev(descriptor, buffers)
        monkeypatch.setattr(os, "writev", os_writev)
        assert write(opened(tmp_path), 1, 2) == file_bytes(2, 64)
        return size

    monkeypatch.setattr(os, "writev", write_after_another)
    files = opened(tmp_path)
    write(files, 1, 2)
    assert read(files, 1, 2) == [1, 2]
    assert [path.suffix for path in (tmp_path / ONE).iterdir()] == [".kv"]


@pytest.mark.parametrize(("deleted", "left"), [((1, 2), (2, 3)), ((2, 3), (1, 2))])
def test_a_block_in_two_files_is_known_while_one_of_them_is_left(tmp_path, deleted, left):
    files, other = opened(tmp_path), opened(tmp_path)
    write(files, 1, 2)
    write(other, 2, 3)  # which does not know of the first file yet
    for known in (files, other):
        known.refresh()
    file_of(tmp_path, *deleted).unlink()
    for known in (files, other):
        known.refresh()
        assert [number for number in (1, 2, 3) if read(known, number)] == [*left]
    file_of(tmp_path, *left).unlink()
    files.refresh()
    assert not [number for number in (1, 2, 3) if key(number) in files]


def test_another_model_has_other_blocks(tmp_path):
    write(opened(tmp_path), 1)
    assert read(opened(tmp_path, fingerprint=OTHER), 1) == []


@given(data=st.data(), read_only=st.booleans())
def test_a_damaged_file_is_not_used_and_its_blocks_can_be_written_again(tmp_path_factory, data, read_only):
    folder = tmp_path_factory.mktemp("blocks")
    files = opened(folder)
    size = write(files, 1, 2)
    path = file_of(folder, 1, 2)
    written = path.read_bytes()
    match data.draw(st.sampled_from(["cut", "longer", "changed", "empty pages"])):
        case "cut":
            damaged = written[: data.draw(st.integers(0, size - 1))]
        case "longer":
            damaged = written + b"x"
        case "changed":
            place = data.draw(st.integers(0, size - 1))
            changed = written[place] ^ data.draw(st.integers(1, 255))
            damaged = written[:place] + bytes([changed]) + written[place + 1 :]
        case _:  # the name was written to the disk, and the content was not
            damaged = bytes(size)
    path.write_bytes(damaged)
    damaged_files = opened(folder, read_only=read_only)
    assert read(damaged_files, 1, 2) == []
    assert key(1) not in damaged_files
    assert path.exists() == read_only
    read(files, 1, 2)  # its own table is in memory, and what is read is checked
    files.refresh()
    if key(1) not in files:
        write(files, 1, 2)
    if not read_only:
        assert read(opened(folder), 1, 2) == [1, 2]


@pytest.mark.parametrize("other", [ONE, OTHER])
def test_a_file_under_another_name_has_its_own_blocks(tmp_path, other):
    write(opened(tmp_path), 1)
    files = opened(tmp_path, fingerprint=other)
    write(files, 2)
    file_of(tmp_path, 2).write_bytes(file_of(tmp_path, 1).read_bytes())
    assert read(files, 2) == []
    assert read(opened(tmp_path, fingerprint=other), 2) == []
    assert read(opened(tmp_path), 1) == [1]


def test_the_least_recently_used_files_of_all_models_are_deleted(tmp_path):
    files, others = opened(tmp_path), opened(tmp_path, fingerprint=OTHER)
    for number, owner in enumerate([files, others, files, others]):
        write(owner, number, number + 10)
        used = file_of(tmp_path, number, number + 10)
        os.utime(used, (number, number))
    files.touch([key(10), key(9)])  # of which one is not there
    size = used.stat().st_size
    assert trim(tmp_path, max_bytes=4 * size) == 4 * size
    assert trim(tmp_path, max_bytes=3 * size - 1) == 2 * size
    assert [read(files, 0, 10), read(others, 1)] == [[0, 10], []]
    assert [read(files, 2), read(others, 3)] == [[], [3]]


def test_a_prompt_is_deleted_from_its_end(tmp_path):
    files = opened(tmp_path)
    for numbers in ((3, 4), (1,), (2, 5, 6)):
        write(files, *numbers)
    files.touch([key(number) for number in (1, 2, 3, 4, 5, 6)])
    trim(tmp_path, max_bytes=file_bytes(1, 64) + file_bytes(3, 64))
    assert [read(files, 1), read(files, 2), read(files, 3)] == [[1], [2], []]
    trim(tmp_path, max_bytes=file_bytes(3, 64))
    assert [read(files, 1), read(files, 2)] == [[1], []]


def test_only_blocks_and_what_killed_processes_left_are_deleted(tmp_path):
    folder = tmp_path / ONE
    folder.mkdir()
    kept = [tmp_path / "notes.txt", tmp_path / f"{key(1).hex()}.kv", folder / "notes.txt", folder / "x.kv"]
    recent, old = (folder / f".{key(number).hex()}.{'a' * 16}" for number in (1, 2))
    for path in (*kept, recent, old):
        path.write_bytes(b"x" * 100)
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    assert trim(tmp_path, max_bytes=0) == 0
    assert sorted(tmp_path.rglob("*")) == sorted([folder, *kept, recent])


@pytest.mark.parametrize("num_bytes", [1, 4096, 100_000])
@pytest.mark.parametrize("can", ["all", "open", "nothing", "a page at a time"])
def test_any_file_system_writes_the_same(tmp_path, monkeypatch, num_bytes, can):
    """Some refuse to go past the page cache when a file is opened so, others when it is used."""
    is_direct, os_writev, os_readv = [], os.writev, os.readv

    def set_flags(descriptor, command, flags):
        if flags and can == "nothing":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        is_direct.append(flags)
        return fcntl.fcntl(descriptor, command, flags)

    def part(buffers):
        if is_direct and is_direct[-1] and can == "open":
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return [buffers[0][:4096]] if can == "a page at a time" else buffers

    monkeypatch.setattr("genserve.engine.block_files.fcntl", set_flags)
    monkeypatch.setattr(os, "writev", lambda descriptor, buffers: os_writev(descriptor, part(buffers)))
    monkeypatch.setattr(os, "readv", lambda descriptor, buffers: os_readv(descriptor, part(buffers)))
    rows = whole_pages(2 * num_bytes)[: 2 * num_bytes].reshape(2, num_bytes)
    rows[:] = [content(number, num_bytes=num_bytes) for number in (1, 2)]
    assert opened(tmp_path).write([key(1), key(2)], rows) == file_bytes(2, num_bytes)
    got = np.zeros_like(rows)
    assert opened(tmp_path).read([key(1), key(2)], got) == 2
    np.testing.assert_array_equal(got, rows)


@contextmanager
def files_no_longer_than(num_bytes: int):
    """As a full disk, which takes a part of a file."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path):
    files = opened(tmp_path)
    rows = np.stack([content(number, num_bytes=1 << 20) for number in (1, 2, 3)])
    with files_no_longer_than(2 << 20), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        files.write([key(1), key(2), key(3)], rows)
    assert list((tmp_path / ONE).iterdir()) == []
    assert key(1) not in files
