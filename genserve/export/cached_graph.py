"""Cached graph: an exported graph with one KV cache, run the plain way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.backends.logits_memory import HostMemory
from genserve.backends.logits_onnx import cache_layer, open_logits_session
from genserve.export.checkpoint import FloatArray
from genserve.export.graph import MODEL_FILE

__all__ = ["CachedGraph"]


class CachedGraph:
    """A graph of `write_decoder` over a cache: for checks, not for speed.

    Attributes:
        caches: [batch, kv_heads, max_len, head_dim], by the name of the graph's input.
    """

    def __init__(self, folder: Path, *, batch: int, max_len: int) -> None:
        path = folder / MODEL_FILE
        self._session = open_logits_session(path, num_threads=None, providers=HostMemory.providers)
        self.caches: dict[str, NDArray[Any]] = {}
        for past in self._session.get_inputs():
            if past.name.startswith("past_key_values."):
                kv_heads, head_dim, dtype = cache_layer(past, path)
                self.caches[past.name] = np.zeros((batch, kv_heads, max_len, head_dim), dtype)

    def forward(self, input_ids: NDArray[np.int64], *, past: Any, rows: Any) -> FloatArray:
        """Run ids [batch, sequence] after `past` tokens of each row, in the first rows of the cache.

        Returns:
            [len(rows), vocab]: logits of those of the batch * sequence hidden rows.
        """
        batch, sequence = input_ids.shape
        seqlens = np.array(past, np.int32) + sequence - 1
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(input_ids))
        binding.bind_cpu_input("seqlens_k", seqlens.astype(np.int32))
        binding.bind_cpu_input("total_len", np.array(seqlens.max() + 1, np.int32))
        binding.bind_cpu_input("rows", np.array(rows, np.int64))
        for name, cache in self.caches.items():
            place = (cache.dtype.type, (batch, *cache.shape[1:]), cache.ctypes.data)
            binding.bind_input(name, "cpu", 0, *place)
            binding.bind_output(name.replace("past_key_values", "present"), "cpu", 0, *place)
        binding.bind_output("logits", "cpu")
        self._session.run_with_iobinding(binding)
        logits: FloatArray = binding.get_outputs()[-1].numpy()
        return logits
