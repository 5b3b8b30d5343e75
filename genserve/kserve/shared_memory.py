"""Shared memory: regions of the system's shared memory that clients put tensors into and take them from."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from genserve.errors import InferenceError, Status
from genserve.tensor import Tensor

__all__ = ["Region", "SharedMemory", "store"]

_FOLDER = Path("/dev/shm")  # where POSIX shared memory has its names


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A registered part of a shared memory object.

    Attributes:
        name: by which requests mean it.
        key: of the object, as for `shm_open`.
        offset: of the region in the object, bytes.
        byte_size: of the region.
        data: its bytes.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    data: memoryview


class SharedMemory:
    """The regions that clients have registered. Safe from any thread.

    A region that is unregistered goes away once nothing that was read from it is in use.
    """

    def __init__(self, *, allowed: bool) -> None:
        """Begin without regions; where they are not `allowed`, no request may register one."""
        self._allowed = allowed
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}

    def register(self, name: str, *, key: str, offset: int, byte_size: int) -> None:
        """Make a region known.

        Raises:
            InferenceError: UNSUPPORTED, the server does not allow it; ALREADY_EXISTS, the name is taken;
                INTERNAL, there is no such object, or it is too small.
        """
        if not self._allowed:
            raise _disabled()
        with self._lock:
            if name in self._regions:
                text = f"shared memory region '{name}' already in manager"
                raise InferenceError(text, status=Status.ALREADY_EXISTS)
            data = _map(key, offset=offset, byte_size=byte_size)
            self._regions[name] = Region(name=name, key=key, offset=offset, byte_size=byte_size, data=data)

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all of them; one that is not known is fine.

        Raises:
            InferenceError: UNSUPPORTED, the server does not allow it.
        """
        if not self._allowed:
            raise _disabled()
        with self._lock:
            if name:
                self._regions.pop(name, None)
            else:
                self._regions.clear()

    def regions(self, name: str = "") -> list[Region]:
        """Return the region of a name, or all of them.

        Raises:
            InferenceError: NOT_FOUND, there is none of this name.
        """
        with self._lock:
            if not name:
                return list(self._regions.values())
            if name in self._regions:
                return [self._regions[name]]
        raise InferenceError(
            f"Unable to find system shared memory region: '{name}'", status=Status.NOT_FOUND
        )

    def view(self, name: str, *, offset: int, byte_size: int) -> memoryview:
        """Return a part of a region, to read from or to write into.

        Raises:
            InferenceError: NOT_FOUND, there is no such region; INVALID_ARG, it is not so large.
        """
        with self._lock:
            region = self._regions.get(name)
        if region is None:
            raise InferenceError(
                f"Unable to find shared memory region: '{name}'", status=Status.NOT_FOUND
            )
        if offset >= region.byte_size:
            raise InferenceError(f"Invalid offset for shared memory region: '{name}'")
        if not 0 < byte_size <= region.byte_size - offset:
            raise InferenceError(f"Invalid offset + byte size for shared memory region: '{name}'")
        return region.data[offset : offset + byte_size]


def store(tensor: Tensor, target: memoryview) -> None:
    """Write an output where its request wants it.

    Raises:
        InferenceError: INTERNAL, there is not enough room; nothing was written.
    """
    data = tensor.to_bytes()
    if len(data) > len(target):
        raise InferenceError(
            f"shared memory size specified with the request for output '{tensor.name}' ({len(target)} bytes) "
            f"should be at least {len(data)} bytes to hold the results",
            status=Status.INTERNAL,
        )
    target[: len(data)] = data


def _disabled() -> InferenceError:
    text = (
        "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
    )
    return InferenceError(text, status=Status.UNSUPPORTED)


def _map(key: str, *, offset: int, byte_size: int) -> memoryview:
    name = key.removeprefix("/")
    try:
        if not name or "/" in name or name in (".", ".."):
            raise OSError
        descriptor = os.open(_FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        text = f"Unable to open shared memory region: '{key}'"
        raise InferenceError(text, status=Status.INTERNAL) from None
    try:
        end = offset + byte_size
        if not byte_size or end > os.fstat(descriptor).st_size:
            raise InferenceError(f"Invalid shared memory region: '{key}'", status=Status.INTERNAL)
        return memoryview(mmap.mmap(descriptor, end))[offset:]
    finally:
        os.close(descriptor)
