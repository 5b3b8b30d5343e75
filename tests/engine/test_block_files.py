from __future__ import annotations

import errno
import os
import resource
import signal
import time
from contextlib import contextmanager

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from genserve.engine.block_files import BlockFiles, trim

ONE, OTHER = "1" * 32, "2" * 32


def key(number: int) -> bytes:
    return bytes([number]) * 32


def content(number: int, *, num_bytes: int = 64) -> np.ndarray:
    return np.random.default_rng(number).integers(256, size=num_bytes, dtype=np.uint8)


def read(files: BlockFiles, number: int) -> np.ndarray | None:
    row = np.zeros(64, np.uint8)
    return row if files.read(key(number), row) else None


def file_of(folder, number: int):
    [path] = folder.rglob(f"{key(number).hex()}.kv")
    return path


def test_a_block_is_read_as_it_was_written(tmp_path):
    BlockFiles(tmp_path / "new", fingerprint=ONE).write(key(1), content(1))
    files = BlockFiles(tmp_path / "new", fingerprint=ONE)
    np.testing.assert_array_equal(read(files, 1), content(1))
    assert read(files, 2) is None
    assert files.write(key(1), content(1)) == 0, "a block that is there is not written again"


def test_two_servers_write_the_same_block_at_once(tmp_path, monkeypatch):
    """In containers, both may have the same ids of process and thread."""
    writev = os.writev

    def write_after_another(descriptor, buffers):
        size = writev(descriptor, buffers)
        monkeypatch.setattr(os, "writev", writev)
        assert BlockFiles(tmp_path, fingerprint=ONE).write(key(1), content(1)) == size
        return size

    monkeypatch.setattr(os, "writev", write_after_another)
    files = BlockFiles(tmp_path, fingerprint=ONE)
    files.write(key(1), content(1))
    np.testing.assert_array_equal(read(files, 1), content(1))
    assert [path.name for path in (tmp_path / ONE).iterdir()] == [f"{key(1).hex()}.kv"]


def test_another_model_has_other_blocks(tmp_path):
    BlockFiles(tmp_path, fingerprint=ONE).write(key(1), content(1))
    assert read(BlockFiles(tmp_path, fingerprint=OTHER), 1) is None


@given(data=st.data())
def test_a_damaged_file_is_no_block_and_can_be_written_again(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("blocks")
    files = BlockFiles(folder, fingerprint=ONE)
    size = files.write(key(1), content(1))
    path = file_of(folder, 1)
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
        case _:     # the name was written to the disk, and the content was not
            damaged = bytes(size)
    path.write_bytes(damaged)
    assert read(files, 1) is None
    files.write(key(1), content(1))
    np.testing.assert_array_equal(read(files, 1), content(1))


@pytest.mark.parametrize("other", [ONE, OTHER])
def test_a_file_of_another_block_or_model_is_no_block(tmp_path, other):
    BlockFiles(tmp_path, fingerprint=ONE).write(key(1), content(1))
    files = BlockFiles(tmp_path, fingerprint=other)
    files.write(key(2), content(2))
    file_of(tmp_path, 2).write_bytes(file_of(tmp_path, 1).read_bytes())
    assert read(files, 2) is None


def test_the_least_recently_used_blocks_of_all_models_are_deleted(tmp_path):
    files, others = BlockFiles(tmp_path, fingerprint=ONE), BlockFiles(tmp_path, fingerprint=OTHER)
    for number, owner in enumerate([files, others, files, others]):
        owner.write(key(number), content(number))
        os.utime(file_of(tmp_path, number), (number, number))
    files.touch([key(0), key(9)])       # of which one is not there
    size = file_of(tmp_path, 0).stat().st_size
    assert trim(tmp_path, max_bytes=4 * size) == 4 * size
    assert trim(tmp_path, max_bytes=3 * size - 1) == 2 * size
    assert [read(files, 0) is None, read(others, 1) is None] == [False, True]
    assert [read(files, 2) is None, read(others, 3) is None] == [True, False]


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


def test_a_full_disk_leaves_no_part_of_a_block(tmp_path):
    files = BlockFiles(tmp_path, fingerprint=ONE)
    with files_no_longer_than(1 << 20), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        files.write(key(1), content(1, num_bytes=3 << 20))
    assert list((tmp_path / ONE).iterdir()) == []
