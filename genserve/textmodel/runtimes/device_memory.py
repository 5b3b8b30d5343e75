"""Device memory: the KV cache and the logits of a graph as torch tensors, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from genserve.backends.onnx_session import CPU_PROVIDER, Provider


class DeviceMemory:
    """The memory of one device of torch; implements `LogitsMemory`.

    ONNX Runtime and torch use separate streams. They are synchronized twice: a run of the graph ends with all
    its work complete, and `settle` is called before the next run.
    """

    is_host = False
    is_lazy = False
    block_size = 256    # FlashAttention in ONNX Runtime reads tiles of 256 keys

    def __init__(self, device: str) -> None:
        """Choose the device by torch's name: "cuda:0", or "cpu" for tensors in the memory of the host."""
        self._torch_device = torch.device(device)
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
        return torch.cuda.mem_get_info(self._torch_device)[0] if self.device == "cuda" else None

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
        """See `LogitsMemory.zeros`."""
        try:
            return torch.zeros(shape, dtype=_torch_dtype(dtype), device=self._torch_device)
        except torch.OutOfMemoryError as error:  # free memory may be fragmented
            raise OverflowError(str(error)) from error

    def rows(self, num_rows: int, width: int, dtype: np.dtype[Any]) -> torch.Tensor:
        """See `LogitsMemory.rows`."""
        return torch.empty((num_rows, width), dtype=_torch_dtype(dtype), device=self._torch_device)

    def moved(self, buffer: Any) -> torch.Tensor:
        """See `LogitsMemory.moved`."""
        tensor: torch.Tensor = buffer.to(self._torch_device)
        return tensor

    def address(self, buffer: Any) -> int:
        """See `LogitsMemory.address`."""
        address: int = buffer.data_ptr()
        return address

    def settle(self) -> None:
        """See `LogitsMemory.settle`."""
        if self.device == "cuda":
            torch.cuda.current_stream(self._torch_device).synchronize()


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
