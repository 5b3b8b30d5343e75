from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from genserve.errors import InferenceError, Status
from genserve.server.kserve.shared_memory import SharedMemory
from genserve.tensor import Tensor


@pytest.fixture
def key() -> Iterator[str]:
    path = Path("/dev/shm") / f"genserve-test-{uuid4().hex}"
    path.write_bytes(bytes(range(64)))
    yield f"/{path.name}"
    path.unlink()


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory(allowed=True)


def test_a_region_reads_and_writes_its_range_of_the_object(memory: SharedMemory, key: str) -> None:
    memory.register("r", key=key, offset=32, byte_size=16)
    assert bytes(memory.part("r", offset=4, byte_size=2).read()) == bytes([36, 37])
    memory.part("r", offset=0, byte_size=8).store(Tensor("Y", np.array([7], np.uint8)))
    assert Path("/dev/shm", key[1:]).read_bytes()[32] == 7


@pytest.mark.parametrize(
    ("offset", "byte_size"), [(16, 1), (15, 2), (0, 17), (0, 0), (2**63, 1), (-4, 4)]
)
def test_a_part_must_lie_within_its_region(memory, key: str, offset: int, byte_size: int) -> None:
    memory.register("r", key=key, offset=0, byte_size=16)
    with pytest.raises(InferenceError, match="for shared memory region: 'r'"):
        memory.part("r", offset=offset, byte_size=byte_size)


@pytest.mark.parametrize(("offset", "byte_size"), [(0, 65), (64, 1), (0, 0), (2**62, 1)])
def test_a_region_must_lie_within_the_object(memory, key: str, offset: int, byte_size: int) -> None:
    with pytest.raises(InferenceError, match=r"failed to register shared memory region .*: invalid args"):
        memory.register("r", key=key, offset=offset, byte_size=byte_size)


@pytest.mark.parametrize("key", ["/nowhere-to-be-found", "", "/", "/..", "/../etc/passwd", "a/b", "/a\0b"])
def test_a_key_cannot_name_other_files(memory: SharedMemory, key: str) -> None:
    with pytest.raises(InferenceError, match=r"Unable to open shared memory region|invalid shm key"):
        memory.register("r", key=key, offset=0, byte_size=8)


def test_a_name_is_taken_until_it_is_unregistered(memory: SharedMemory, key: str) -> None:
    memory.register("r", key=key, offset=0, byte_size=8)
    part = memory.part("r", offset=0, byte_size=8)
    with pytest.raises(InferenceError, match="shared memory region 'r' already in manager") as caught:
        memory.register("r", key=key, offset=0, byte_size=8)
    assert caught.value.status is Status.ALREADY_EXISTS
    memory.unregister("r")
    memory.unregister("r")
    memory.register("r", key=key, offset=0, byte_size=8)
    assert bytes(part.read()[:2]) == b"\0\1"  # what is still in use stays
    memory.unregister()
    assert memory.regions() == []


def test_an_output_that_is_too_large_is_not_written(memory: SharedMemory, key: str) -> None:
    memory.register("r", key=key, offset=0, byte_size=8)
    target = memory.part("r", offset=0, byte_size=3)
    with pytest.raises(InferenceError, match=r"output 'Y' \(3 bytes\) should be at least 4 bytes"):
        target.store(Tensor("Y", np.array([-1], np.int32)))
    assert bytes(target.read()) == b"\0\1\2"


def test_a_shrunk_object_is_an_error(memory: SharedMemory, key: str) -> None:
    memory.register("r", key=key, offset=16, byte_size=32)
    part = memory.part("r", offset=16, byte_size=8)
    os.truncate(f"/dev/shm{key}", 36)
    for look in (
        part.read,
        lambda: part.store(Tensor("Y", np.ones(1, np.uint8))),
        lambda: memory.part("r", offset=16, byte_size=8),
    ):
        with pytest.raises(InferenceError, match="Invalid offset"):
            look()
    assert Path(f"/dev/shm{key}").stat().st_size == 36


def test_an_object_is_closed_with_its_region(memory: SharedMemory, key: str) -> None:
    def is_open() -> bool:
        return Path("/dev/shm", key[1:]) in [path.resolve() for path in Path("/proc/self/fd").iterdir()]

    memory.register("r", key=key, offset=0, byte_size=8)
    assert is_open()
    memory.unregister("r")
    assert not is_open()


def test_disabled_shared_memory_rejects_regions(key: str) -> None:
    closed = SharedMemory(allowed=False)
    with pytest.raises(InferenceError, match="Client shared memory is disabled") as caught:
        closed.register("r", key=key, offset=0, byte_size=8)
    assert caught.value.status is Status.UNSUPPORTED
