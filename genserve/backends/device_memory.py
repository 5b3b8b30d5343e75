"""Device memory: the KV cache and the logits of a graph as torch tensors, on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from genserve.backends.kv_cache import KvCache, Layers, token_bytes
from genserve.backends.onnx_session import Provider

__all__ = ["DeviceMemory"]

logger = logging.getLogger(__name__)

_CPU = Provider(name="CPUExecutionProvider", options={})


class DeviceMemory:
    """The memory of one device of torch; implements `LogitsMemory`.

    ONNX Runtime and torch have streams of their own. Neither runs ahead of the other: a run of the graph
    ends with all that it has begun, and `settle` is called before the next.
    """

    is_host = False

    def __init__(self, device: str) -> None:
        """Choose the device by torch's name: "cuda:0"; "cpu" is the same in the memory of the host."""
        self._torch_device = torch.device(device)
        self.device = self._torch_device.type
        self.device_id = self._torch_device.index or 0
        # Doubling what it takes, ONNX Runtime's habit, leaves no room beside a large cache.
        options = {"device_id": str(self.device_id), "arena_extend_strategy": "kSameAsRequested"}
        cuda = Provider(name="CUDAExecutionProvider", options=options)
        self.providers: Sequence[Provider] = (cuda, _CPU) if self.device == "cuda" else (_CPU,)

    def free_bytes(self) -> int | None:
        """See `LogitsMemory.free_bytes`."""
        return torch.cuda.mem_get_info(self._torch_device)[0] if self.device == "cuda" else None

    def cache(
        self, layers: Layers, *, num_slots: int, max_length: int, cache_bytes: int | None
    ) -> KvCache:
        """See `LogitsMemory.cache`; all of the memory is taken at once, and nothing is given back."""
        fitting = self._num_fitting(
            num_slots, slot_bytes=max_length * token_bytes(layers), cache_bytes=cache_bytes
        )
        try:
            buffers = {
                name: torch.zeros(
                    (fitting, kv_heads, max_length, head_dim),
                    dtype=torch.from_numpy(np.empty(0, dtype)).dtype,
                    device=self._torch_device,
                )
                for name, (kv_heads, head_dim, dtype) in layers.items()
            }
        except torch.OutOfMemoryError as error:  # what is free may lie in pieces
            raise OverflowError(str(error)) from error
        return KvCache(layers, buffers, num_slots=fitting, page_tokens=1)

    def _num_fitting(self, num_slots: int, *, slot_bytes: int, cache_bytes: int | None) -> int:
        budget = num_slots * slot_bytes if cache_bytes is None else cache_bytes
        free_bytes = self.free_bytes()
        if free_bytes is not None:
            budget = min(budget, free_bytes * 9 // 10)  # a run needs memory of its own
        fitting = min(num_slots, budget // slot_bytes)
        if not fitting:
            raise OverflowError(f"one slot takes {slot_bytes} bytes, the cache may take {budget}")
        if fitting < num_slots:
            logger.warning(
                "%d token sequences share a step on %s, not %d: a slot takes %d MiB, the cache may take %d",
                fitting, self._torch_device, num_slots, slot_bytes >> 20, budget >> 20,
            )
        return fitting

    def logits(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """See `LogitsMemory.logits`."""
        return torch.empty((num_rows, num_tokens), dtype=torch.float32, device=self._torch_device)

    def address(self, buffer: Any) -> int:
        """See `LogitsMemory.address`."""
        address: int = buffer.data_ptr()
        return address

    def settle(self) -> None:
        """See `LogitsMemory.settle`."""
        if self.device == "cuda":
            torch.cuda.current_stream(self._torch_device).synchronize()
