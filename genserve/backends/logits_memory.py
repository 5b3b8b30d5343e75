"""Logits memory: where a logits graph has its KV cache and its logits, and what runs it there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from genserve.backends.free_memory import free_memory_bytes
from genserve.backends.kv_cache import lazy_zeros
from genserve.backends.onnx_session import Provider

__all__ = ["HostMemory", "LogitsMemory"]


class LogitsMemory(Protocol):
    """The memory of one device. A buffer of it is a numpy array, or an object with `__dlpack__`.

    Attributes:
        device: what ONNX Runtime calls it: "cpu" or "cuda".
        device_id: which of them.
        providers: what runs the graph, in the order of preference.
        is_host: whether what is bound from the memory of the host is read where it lies; else ONNX
            Runtime copies it to the device when it is bound.
        is_lazy: whether a buffer takes memory only as it is written.
        block_size: tokens of a block of the KV cache.
    """

    device: str
    device_id: int
    providers: Sequence[Provider]
    is_host: bool
    is_lazy: bool
    block_size: int

    def free_bytes(self) -> int | None:
        """Return how much of it nobody uses; None where that is not known."""

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a buffer of zeros.

        Raises:
            OSError, OverflowError: there is no room for it.
        """

    def logits(self, num_rows: int, num_tokens: int) -> Any:
        """Return a buffer [num_rows, num_tokens] float32, of any content."""

    def address(self, buffer: Any) -> int:
        """Return where the first element of a buffer lies."""

    def settle(self) -> None:
        """Wait for what was done to buffers other than by running the graph."""


class HostMemory:
    """The memory of the CPU; implements `LogitsMemory`."""

    device = "cpu"
    device_id = 0
    providers: Sequence[Provider] = (Provider(name="CPUExecutionProvider", options={}),)
    is_host = True
    is_lazy = True
    block_size = 16

    def free_bytes(self) -> int | None:
        """See `LogitsMemory.free_bytes`."""
        return free_memory_bytes()

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """See `LogitsMemory.zeros`."""
        return lazy_zeros(shape, dtype)

    def logits(self, num_rows: int, num_tokens: int) -> Any:
        """See `LogitsMemory.logits`."""
        return np.empty((num_rows, num_tokens), dtype=np.float32)

    def address(self, buffer: Any) -> int:
        """See `LogitsMemory.address`."""
        address: int = buffer.ctypes.data
        return address

    def settle(self) -> None:
        """See `LogitsMemory.settle`: nothing is ever under way."""
