"""KV cache memory: the buffers of a KV cache, in the memory of the host or of a GPU, and how much is free."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genserve.backends.libraries import import_torch
from genserve.backends.onnx_session import CPU_PROVIDER, Provider
from genserve.kernels import library
from genserve.machine import free_memory_bytes
from genserve.sampling.logits_array import on_host

# Shape and type of one token in each buffer of a cache, by the name of the graph's input. Keys and values are
# [kv_heads, head_dim], the scales of an int8 cache [kv_heads].
TokenShapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
# Shape of one sequence's state in each buffer of recurrent states, which are float32, by the same name.
StateShapes: TypeAlias = Mapping[str, tuple[int, ...]]

_ROW_BUFFER = np.dtype([("data", "u8"), ("row_bytes", "i8")])  # as `operators.cpp` reads it
# Larger copies are shared with another thread: between two forwards, that of the engine works alone.
_COPIER = ThreadPoolExecutor(1, thread_name_prefix="kv-cache-copy")
_SHARED_BYTES = 1 << 20


class KVCache:
    """One buffer for each input of the graph that holds keys, values, or recurrent states.

    Used by one thread.

    Attributes:
        buffers: keys and values [num_blocks, block_size, ...], numpy arrays or torch tensors, by the name of
            the input.
        states: recurrent states [num_state_slots, ...], in the same way.
        block_bytes: size of one block in all buffers.
        state_bytes: size of one sequence's states in all buffers.
    """

    def __init__(self, buffers: Mapping[str, Any], states: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Use the given buffers, without a copy."""
        self.buffers, self.states = buffers, states
        self._block_rows, self._state_rows = _rows_of(buffers), _rows_of(states)
        self.block_bytes = self._block_rows.row_bytes
        self.state_bytes = self._state_rows.row_bytes

    @property
    def nbytes(self) -> int:
        """Size of the whole cache."""
        return sum(buffer.nbytes for buffer in (*self.buffers.values(), *self.states.values()))

    def first_states(self) -> dict[str, list[int]]:
        """Return the slots of the states in a forward of one new sequence; none without states."""
        return {"state_source": [-1], "state_target": [0]} if self.states else {}

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, given as pairs (source, target)."""
        for buffer in self.buffers.values():
            for source, target in pairs:
                buffer[target] = buffer[source]

    def read_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copy whole blocks into `rows`: [len(block_ids), block_bytes], C-contiguous, buffer after buffer."""
        self._block_rows.read(block_ids, rows)

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Overwrite whole blocks with rows of `read_blocks`."""
        self._block_rows.write(block_ids, rows)

    def read_states(self, slots: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copy recurrent states into `rows`: [len(slots), state_bytes], C-contiguous, buffer after buffer."""
        self._state_rows.read(slots, rows)

    def write_states(self, slots: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Overwrite recurrent states with rows of `read_states`."""
        self._state_rows.write(slots, rows)


def _rows_of(buffers: Mapping[str, Any]) -> _HostRows | _DeviceRows:
    on_host = all(isinstance(buffer, np.ndarray) for buffer in buffers.values())
    return _HostRows(buffers) if on_host else _DeviceRows(buffers)


class _HostRows:
    """The rows of buffers in the memory of the host, side by side; kernels copy them in one pass."""

    def __init__(self, buffers: Mapping[str, NDArray[Any]]) -> None:
        tables = [(buffer.ctypes.data, buffer.nbytes // len(buffer)) for buffer in buffers.values()]
        self._tables = np.array(tables, _ROW_BUFFER)
        self._num_rows = min(map(len, buffers.values()), default=0)
        self.row_bytes = int(self._tables["row_bytes"].sum())

    def read(self, indices: Sequence[int], rows: NDArray[np.uint8]) -> None:
        self._copy(library().genserve_gather_rows, indices, rows)

    def write(self, indices: Sequence[int], rows: NDArray[np.uint8]) -> None:
        self._copy(library().genserve_scatter_rows, indices, rows)

    def _copy(self, copy: Callable[..., None], indices: Sequence[int], rows: NDArray[np.uint8]) -> None:
        wanted = np.asarray(indices, np.int64)
        assert rows.shape == (len(wanted), self.row_bytes)
        assert rows.flags.c_contiguous
        assert ((wanted >= 0) & (wanted < self._num_rows)).all()

        def copy_part(part: slice) -> None:
            own, own_rows = wanted[part], rows[part]
            copy(self._tables.ctypes.data, len(self._tables), own.ctypes.data, len(own), own_rows.ctypes.data)

        half = len(wanted) // 2 if rows.nbytes >= _SHARED_BYTES else 0
        other = _COPIER.submit(copy_part, slice(half)) if half else None
        copy_part(slice(half, None))
        if other is not None:
            other.result()


class _DeviceRows:
    """The same for tensors of torch, on any device."""

    def __init__(self, buffers: Mapping[str, Any]) -> None:
        self._buffers = buffers
        self.row_bytes = sum(buffer.nbytes // len(buffer) for buffer in buffers.values())

    def read(self, indices: Sequence[int], rows: NDArray[np.uint8]) -> None:
        wanted = np.asarray(indices, np.int64)
        for buffer, part in self._parts(rows):
            part[:] = on_host(buffer[wanted]).reshape(len(wanted), -1).view(np.uint8)

    def write(self, indices: Sequence[int], rows: NDArray[np.uint8]) -> None:
        wanted = np.asarray(indices, np.int64)
        for buffer, part in self._parts(rows):
            dtype = np.dtype(str(buffer.dtype).removeprefix("torch."))
            values = np.ascontiguousarray(part).view(dtype).reshape(-1, *buffer.shape[1:])
            buffer[wanted] = buffer.new_tensor(values)  # which copies them to its device

    def _parts(self, rows: NDArray[np.uint8]) -> Iterator[tuple[Any, NDArray[np.uint8]]]:
        """Yield each buffer with its columns of the rows."""
        end = 0
        for buffer in self._buffers.values():
            start, end = end, end + buffer.nbytes // len(buffer)
            yield buffer, rows[:, start:end]


def token_bytes(shapes: TokenShapes) -> int:
    """Return the size of one token's keys and values in all layers."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def slot_bytes(shapes: StateShapes) -> int:
    """Return the size of one sequence's recurrent states in all layers."""
    return sum(math.prod(shape) * 4 for shape in shapes.values())


def lazy_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeros whose memory is allocated page by page, when they are touched.

    numpy's own allocation asks for huge pages, so every layer's keys and values take at least 2 MiB: 120 MiB
    for the first token of 30 layers.

    Raises:
        OSError, OverflowError: the address space is too small.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=dtype).reshape(shape)


class LogitsMemory(Protocol):
    """The memory of one device. Its buffers are numpy arrays, or objects with `__dlpack__`.

    Attributes:
        device: ONNX Runtime's name of its kind: "cpu" or "cuda".
        device_id: number of the device among the devices of its kind.
        providers: execution providers for the graph, in the order of preference.
        is_host: whether ONNX Runtime reads inputs bound from host memory in place; otherwise binding an input
            copies it to the device.
        is_lazy: whether the memory of a buffer is allocated only when the buffer is written.
        block_size: tokens of a block of the KV cache.
    """

    device: str
    device_id: int
    providers: Sequence[Provider]
    is_host: bool
    is_lazy: bool
    block_size: int

    def free_bytes(self) -> int | None:
        """Return the size of the unused memory; None: unknown."""

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a buffer of zeros.

        Raises:
            OSError, OverflowError: the buffer does not fit.
        """

    def rows(self, num_rows: int, width: int, dtype: np.dtype[Any]) -> Any:
        """Return an uninitialized buffer [num_rows, width], of logits or hidden states."""

    def moved(self, buffer: Any) -> Any:
        """Return a buffer of a memory of the same kind in this one: itself, if it is there."""

    def address(self, buffer: Any) -> int:
        """Return the address of the first element of a buffer."""

    def settle(self) -> None:
        """Wait for all operations on buffers other than runs of the graph."""


class HostMemory:
    """The memory of the CPU; implements `LogitsMemory`."""

    device = "cpu"
    device_id = 0
    providers: Sequence[Provider] = (CPU_PROVIDER,)
    is_host = True
    is_lazy = True
    block_size = 16

    def free_bytes(self) -> int | None:
        """See `LogitsMemory.free_bytes`."""
        return free_memory_bytes()

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """See `LogitsMemory.zeros`."""
        return lazy_zeros(shape, dtype)

    def rows(self, num_rows: int, width: int, dtype: np.dtype[Any]) -> Any:
        """See `LogitsMemory.rows`."""
        return np.empty((num_rows, width), dtype)

    def moved(self, buffer: Any) -> Any:
        """See `LogitsMemory.moved`."""
        return buffer

    def address(self, buffer: Any) -> int:
        """See `LogitsMemory.address`."""
        address: int = buffer.ctypes.data
        return address

    def settle(self) -> None:
        """Do nothing: numpy's operations are complete when they return."""


class DeviceMemory:
    """The memory of one device of torch; implements `LogitsMemory`.

    ONNX Runtime and torch use separate streams. They are synchronized twice: a run of the graph ends with all
    its work complete, and `settle` is called before the next run.
    """

    is_host = False
    is_lazy = False
    block_size = 256    # FlashAttention in ONNX Runtime reads tiles of 256 keys

    def __init__(self, device: str) -> None:
        """Choose the device by torch's name: "cuda:0", or "cpu" for tensors in the memory of the host.

        Raises:
            MissingDependency: torch is not installed.
        """
        self._torch = import_torch("a KV cache on a GPU")
        self._torch_device = self._torch.device(device)
        self.device = self._torch_device.type
        self.device_id = self._torch_device.index or 0
        # By default ONNX Runtime doubles its arena, which does not fit next to a large cache.
        options = {"device_id": str(self.device_id), "arena_extend_strategy": "kSameAsRequested"}
        cuda = Provider(name="CUDAExecutionProvider", options=options)
        self.providers: Sequence[Provider] = (
            (cuda, CPU_PROVIDER) if self.device == "cuda" else (CPU_PROVIDER,)
        )

    def free_bytes(self) -> int | None:
        """See `LogitsMemory.free_bytes`."""
        if self.device != "cuda":
            return None
        free_bytes: int = self._torch.cuda.mem_get_info(self._torch_device)[0]
        return free_bytes

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """See `LogitsMemory.zeros`."""
        try:
            return self._torch.zeros(shape, dtype=self._dtype(dtype), device=self._torch_device)
        except self._torch.OutOfMemoryError as error:  # free memory may be fragmented
            raise OverflowError(str(error)) from error

    def rows(self, num_rows: int, width: int, dtype: np.dtype[Any]) -> Any:
        """See `LogitsMemory.rows`."""
        return self._torch.empty((num_rows, width), dtype=self._dtype(dtype), device=self._torch_device)

    def moved(self, buffer: Any) -> Any:
        """See `LogitsMemory.moved`."""
        return buffer.to(self._torch_device)

    def address(self, buffer: Any) -> int:
        """See `LogitsMemory.address`."""
        address: int = buffer.data_ptr()
        return address

    def settle(self) -> None:
        """See `LogitsMemory.settle`."""
        if self.device == "cuda":
            self._torch.cuda.current_stream(self._torch_device).synchronize()

    def _dtype(self, dtype: np.dtype[Any]) -> Any:
        return self._torch.from_numpy(np.empty(0, dtype)).dtype
