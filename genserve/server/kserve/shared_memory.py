"""Shared memory: regions of system shared memory through which clients exchange tensors."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from genserve.errors import InferenceError, Status
from genserve.request_context import current_request
from genserve.tensor import Tensor

_RESERVED = "triton_python_backend_shm_region_"     # belongs to a Triton on the same machine
_FOLDER = Path("/dev/shm")  # the names of POSIX shared memory objects


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Region:
    """A registered part of a shared memory object.

    Attributes:
        name: the region's name in requests.
        key: the object's name, as for `shm_open`.
        offset: where the region begins in the object, bytes.
        byte_size: the size of the region.
        descriptor: the open object; closed when the region is garbage-collected.
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
    """A part of a region, for reading or writing.

    Bytes are copied by system calls, never mapped: if the client shrinks the object, access to a mapping
    would kill the process.
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
        """Write an output to the region.

        Raises:
            InferenceError: the part is too small, or the object has become too small. Nothing was written.
        """
        data = memoryview(tensor.to_bytes())
        if len(data) > self.byte_size:
            raise InferenceError(
                f"shared memory size specified with the request for output '{tensor.name}' "
                f"({self.byte_size} bytes) should be at least {len(data)} bytes to hold the results"
            )
        self.check()
        done = 0
        while done < len(data):
            done += os.pwrite(self.region.descriptor, data[done:], self._start + done)

    def check(self) -> None:
        """Raise InferenceError, INVALID_ARG, if the object has become too small for this part."""
        if self._start + self.byte_size > os.fstat(self.region.descriptor).st_size:
            raise _out_of_bounds(self.region.name)

    @property
    def _start(self) -> int:
        return self.region.offset + self.offset


def _disabled() -> InferenceError:
    return InferenceError(
        "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
        status=Status.UNSUPPORTED,
    )


class SharedMemory:
    """The regions that clients have registered. Safe from any thread.

    An unregistered region stays open until all outputs for it are written.
    """

    def __init__(self, *, allowed: bool, refusal: Callable[[], InferenceError] = _disabled) -> None:
        """Begin without regions; unless `allowed`, a registration is rejected with an error of `refusal`."""
        self._allowed = allowed
        self._refusal = refusal
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}

    def register(self, name: str, *, key: str, offset: int, byte_size: int) -> None:
        """Register a region.

        Raises:
            InferenceError: UNSUPPORTED, regions are disabled; ALREADY_EXISTS, the name is taken;
                INVALID_ARG, there is no such object, or it is too small.
        """
        current_request().change = f"region {name} is {byte_size} bytes of {key}"
        self.require_enabled()
        with self._lock:
            if name in self._regions:
                text = f"shared memory region '{name}' already in manager"
                raise InferenceError(text, status=Status.ALREADY_EXISTS)
            descriptor = _open(name, key, offset=offset, byte_size=byte_size)
            self._regions[name] = Region(
                name=name, key=key, offset=offset, byte_size=byte_size, descriptor=descriptor
            )

    def unregister(self, name: str = "") -> None:
        """Unregister a region, or all of them; an unknown name is ignored.

        Raises:
            InferenceError: UNSUPPORTED, regions are disabled.
        """
        current_request().change = f"region {name}" if name else "all regions"
        self.require_enabled()
        with self._lock:
            if name:
                self._regions.pop(name, None)
            else:
                self._regions.clear()

    def require_enabled(self) -> None:
        """Raise the InferenceError of `refusal` if clients may not register regions."""
        if not self._allowed:
            raise self._refusal()

    def regions(self, name: str = "") -> list[Region]:
        """Return the region with a name, or all of them.

        Raises:
            InferenceError: NOT_FOUND, there is no such region.
        """
        with self._lock:
            if not name:
                return list(self._regions.values())
            if name in self._regions:
                return [self._regions[name]]
        raise InferenceError(f"Unable to find system shared memory region: '{name}'", status=Status.NOT_FOUND)

    def part(self, name: str, *, offset: int, byte_size: int) -> RegionPart:
        """Return a part of a region, for reading or writing.

        Raises:
            InferenceError: NOT_FOUND, there is no such region; INVALID_ARG, the part exceeds it.
        """
        with self._lock:
            region = self._regions.get(name)
        if region is None:
            raise InferenceError(f"Unable to find shared memory region: '{name}'", status=Status.NOT_FOUND)
        if not 0 <= offset < region.byte_size:
            raise InferenceError(f"Invalid offset for shared memory region: '{name}'")
        if not 0 < byte_size <= region.byte_size - offset:
            raise _out_of_bounds(name)
        part = RegionPart(region=region, offset=offset, byte_size=byte_size)
        part.check()
        return part


def _out_of_bounds(name: str) -> InferenceError:
    return InferenceError(f"Invalid offset + byte size for shared memory region: '{name}'")


def _open(name: str, key: str, *, offset: int, byte_size: int) -> int:
    """Open an object, and check that it contains a region."""
    file = key.lstrip("/")
    if not file:
        raise InferenceError(f"cannot register shared memory region '{name}' - invalid shm key '{key}'")
    if file.startswith(_RESERVED):
        raise InferenceError(
            f"cannot register shared memory region '{name}' with key '{key}' as the key contains the "
            f"reserved prefix '{_RESERVED}'"
        )
    try:
        if "/" in file or key.startswith("//") or file in (".", ".."):
            raise OSError
        descriptor = os.open(_FOLDER / file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        text = f"Unable to open shared memory region: '{key}'"
        raise InferenceError(text) from None
    if not byte_size or offset + byte_size > os.fstat(descriptor).st_size:
        os.close(descriptor)
        raise InferenceError(f"failed to register shared memory region '{name}': invalid args")
    return descriptor


def reject_cuda_region(name: str) -> None:
    """Raise InferenceError, NOT_FOUND, if a request names a region of CUDA shared memory: there are none."""
    if name:
        text = f"Unable to find cuda shared memory region: '{name}'"
        raise InferenceError(text, status=Status.NOT_FOUND)


def cuda_unsupported(name: str) -> InferenceError:
    """Return the error for registering a region of CUDA shared memory."""
    return InferenceError(
        f"failed to register CUDA shared memory region: '{name}', GPUs not supported",
        status=Status.UNSUPPORTED,
        remedy="send tensors in binary form, or through system shared memory",
    )
