"""Shared memory: regions of the system's shared memory that clients put tensors into and take them from."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from genserve.errors import InferenceError, Status
from genserve.tensor import Tensor

__all__ = ["Region", "RegionPart", "SharedMemory"]

_FOLDER = Path("/dev/shm")  # where POSIX shared memory has its names


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Region:
    """A registered part of a shared memory object.

    Attributes:
        name: by which requests mean it.
        key: of the object, as for `shm_open`.
        offset: of the region in the object, bytes.
        byte_size: of the region.
        descriptor: of the object; closed with the last reference to this.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    descriptor: int

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPart:
    """A part of a region, to read from or to write into.

    Bytes are copied by system calls, never mapped: the object is the client's, and were it made smaller, a
    look at a mapping of it would end the process.
    """

    region: Region
    offset: int
    byte_size: int

    def read(self) -> memoryview:
        """Return a copy of the bytes, writable.

        Raises:
            InferenceError: INVALID_ARG, the object has become too small.
        """
        data = memoryview(bytearray(self.byte_size))
        done = 0
        while done < self.byte_size:
            num_read = os.preadv(self.region.descriptor, [data[done:]], self._start + done)
            if not num_read:
                raise _out_of_bounds(self.region.name)
            done += num_read
        return data

    def store(self, tensor: Tensor) -> None:
        """Write an output where its request wants it.

        Raises:
            InferenceError: INTERNAL, there is not enough room; INVALID_ARG, the object has become too small.
                Nothing was written.
        """
        data = memoryview(tensor.to_bytes())
        if len(data) > self.byte_size:
            raise InferenceError(
                f"shared memory size specified with the request for output '{tensor.name}' "
                f"({self.byte_size} bytes) should be at least {len(data)} bytes to hold the results",
                status=Status.INTERNAL,
            )
        self.check()
        done = 0
        while done < len(data):
            done += os.pwrite(self.region.descriptor, data[done:], self._start + done)

    def check(self) -> None:
        """Raise InferenceError, INVALID_ARG, where the object has become too small for this part."""
        if self._start + self.byte_size > os.fstat(self.region.descriptor).st_size:
            raise _out_of_bounds(self.region.name)

    @property
    def _start(self) -> int:
        return self.region.offset + self.offset


class SharedMemory:
    """The regions that clients have registered. Safe from any thread.

    A region that is unregistered goes away once no output is to be written into it.
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
        self.refuse_if_disabled()
        with self._lock:
            if name in self._regions:
                text = f"shared memory region '{name}' already in manager"
                raise InferenceError(text, status=Status.ALREADY_EXISTS)
            descriptor = _open(key, offset=offset, byte_size=byte_size)
            self._regions[name] = Region(
                name=name, key=key, offset=offset, byte_size=byte_size, descriptor=descriptor
            )

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all of them; one that is not known is fine.

        Raises:
            InferenceError: UNSUPPORTED, the server does not allow it.
        """
        self.refuse_if_disabled()
        with self._lock:
            if name:
                self._regions.pop(name, None)
            else:
                self._regions.clear()

    def refuse_if_disabled(self) -> None:
        """Raise InferenceError, UNSUPPORTED, where clients may register no region."""
        if not self._allowed:
            raise InferenceError(
                "Client shared memory is disabled. "
                "Start the server with '--allow-client-shm=true' to enable.",
                status=Status.UNSUPPORTED,
            )

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

    def part(self, name: str, *, offset: int, byte_size: int) -> RegionPart:
        """Return a part of a region, to read from or to write into.

        Raises:
            InferenceError: NOT_FOUND, there is no such region; INVALID_ARG, it is not so large, or no longer.
        """
        with self._lock:
            region = self._regions.get(name)
        if region is None:
            raise InferenceError(
                f"Unable to find shared memory region: '{name}'", status=Status.NOT_FOUND
            )
        if not 0 <= offset < region.byte_size:
            raise InferenceError(f"Invalid offset for shared memory region: '{name}'")
        if not 0 < byte_size <= region.byte_size - offset:
            raise _out_of_bounds(name)
        part = RegionPart(region=region, offset=offset, byte_size=byte_size)
        part.check()
        return part


def _out_of_bounds(name: str) -> InferenceError:
    return InferenceError(f"Invalid offset + byte size for shared memory region: '{name}'")


def _open(key: str, *, offset: int, byte_size: int) -> int:
    """Return a descriptor of an object that has such a part."""
    name = key.removeprefix("/")
    try:
        if not name or "/" in name or name in (".", ".."):
            raise OSError
        descriptor = os.open(_FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        text = f"Unable to open shared memory region: '{key}'"
        raise InferenceError(text, status=Status.INTERNAL) from None
    if not byte_size or offset + byte_size > os.fstat(descriptor).st_size:
        os.close(descriptor)
        raise InferenceError(f"Invalid shared memory region: '{key}'", status=Status.INTERNAL)
    return descriptor
