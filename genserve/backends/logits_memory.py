"""Logits memory: where a logits graph has its KV cache and its logits, and what runs it there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from genserve.backends.free_memory import free_memory_bytes
from genserve.backends.kv_cache import KvCache
from genserve.backends.onnx_session import Provider

__all__ = ["HostMemory", "Layers", "LogitsMemory", "SlotCache"]

# kv_heads, head_dim and type of an element, by the name of the graph's input.
Layers: TypeAlias = Mapping[str, tuple[int, int, np.dtype[Any]]]


class SlotCache(Protocol):
    """The keys and values of all slots; `KvCache` has the words' meanings."""

    @property
    def num_slots(self) -> int:
        """How many token sequences have a place."""

    @property
    def page_tokens(self) -> int:
        """A slot's memory is taken and given back for so many tokens at a time."""

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache, if every slot is used to its end."""

    def slots(self, first_slot: int, *, num_slots: int) -> Iterator[tuple[str, Any]]:
        """See `KvCache.slots`."""

    def move(self, *, source: int, target: int, length: int) -> None:
        """See `KvCache.move`."""

    def give_back(self, slot: int, *, length: int) -> None:
        """See `KvCache.give_back`."""


class LogitsMemory(Protocol):
    """The memory of one device. A buffer of it is a numpy array, or an object with `__dlpack__`.

    Attributes:
        device: what ONNX Runtime calls it: "cpu" or "cuda".
        device_id: which of them.
        providers: what runs the graph, in the order of preference.
        is_host: whether what is bound from the memory of the host is read where it lies; else ONNX
            Runtime copies it to the device when it is bound.
    """

    device: str
    device_id: int
    providers: Sequence[Provider]
    is_host: bool

    def free_bytes(self) -> int | None:
        """Return how much of it nobody uses; None where that is not known."""

    def cache(
        self, layers: Layers, *, num_slots: int, max_length: int, cache_bytes: int | None
    ) -> SlotCache:
        """Return a cache of so many slots; see `KvCache`.

        Where memory is not taken as tokens come, it has fewer, so that all of them fit into `cache_bytes`.

        Raises:
            OSError, OverflowError: there is no room for one.
        """

    def logits(self, num_rows: int, num_tokens: int) -> Any:
        """Return a buffer [num_rows, num_tokens] float32."""

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

    def free_bytes(self) -> int | None:
        """See `LogitsMemory.free_bytes`."""
        return free_memory_bytes()

    def cache(
        self, layers: Layers, *, num_slots: int, max_length: int, cache_bytes: int | None
    ) -> KvCache:
        """See `LogitsMemory.cache`: all slots, whose memory is taken as tokens come."""
        return KvCache(layers, num_slots=num_slots, max_length=max_length)

    def logits(self, num_rows: int, num_tokens: int) -> Any:
        """See `LogitsMemory.logits`."""
        return np.empty((num_rows, num_tokens), dtype=np.float32)

    def address(self, buffer: Any) -> int:
        """See `LogitsMemory.address`."""
        address: int = buffer.ctypes.data
        return address

    def settle(self) -> None:
        """See `LogitsMemory.settle`: nothing is ever under way."""
