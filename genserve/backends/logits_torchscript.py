"""TorchScript logits: a traced decoder with its KV cache, one tensor that it writes in place."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from genserve.backends.cached_logits import CachedLogits, padded, slot_length
from genserve.backends.logits_memory import HostMemory, LogitsMemory
from genserve.backends.torch_module import torch_library
from genserve.errors import RepositoryError
from genserve.generation.logits_model import LogitsArray, TokenArray

__all__ = ["TorchLogits"]

_CACHE_TYPES = {"fp32": np.float32, "fp16": np.float16}     # by the precision of the export


class TorchLogits(CachedLogits):
    """A `model.pt` of `genserve export`; implements `generation.LogitsModel`. One thread uses it.

    Attributes:
        metadata: what the exporter wrote into the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_slots: int,
        max_length: int | None = None,
        cache_bytes: int | None = None,
        memory: LogitsMemory | None = None,
    ) -> None:
        """Load the module.

        Args:
            path: the model.pt.
            num_slots: how many token sequences may run together; fewer, if the memory has no room for them.
            max_length: tokens per slot; None: the module's whole context. Less, if the cache holds less.
            cache_bytes: what the cache may hold of all slots together; None: all of it.
            memory: of the device that runs it; None: of the host. The logits are of its kind.

        Raises:
            MissingDependency: PyTorch is not installed.
            RepositoryError: the file cannot be loaded, or is not such a module.
        """
        self._torch = torch = torch_library()
        memory = memory or HostMemory()
        self._is_host = memory.is_host
        self._device = torch.device("cpu" if memory.is_host else f"{memory.device}:{memory.device_id}")
        self._module, self.metadata = _load(path, torch, device=self._device)
        context_length, num_layers, num_kv_heads, head_dim, self.vocab_size = _sizes(self.metadata, path)
        # To the cache all layers are one, with the heads of all of them.
        heads, element = num_layers * 2 * num_kv_heads, _CACHE_TYPES[self.metadata["genserve.precision"]]
        super().__init__(
            memory,
            {"kv_cache": (heads, head_dim, np.dtype(element))},
            path=path,
            num_slots=num_slots,
            max_length=slot_length(max_length, context_length=context_length, path=path),
            cache_bytes=cache_bytes,
        )
        [(_, buffer)] = self.cache.slots(0, num_slots=self.num_slots)
        by_layer = (self.num_slots, num_layers, 2, num_kv_heads, -1, head_dim)
        self._kv_cache = torch.as_tensor(buffer).view(by_layer)
        self._spoiled = np.zeros(self.num_slots, dtype=np.int64)  # so many positions may hold a NaN
        for _ in range(2):  # the first two runs compile, which a request should not wait for
            self.prefill([[0]], first_slot=0, past=0)

    def prefill(self, chunks: Sequence[Sequence[int]], *, first_slot: int, past: int) -> LogitsArray:
        """See `LogitsModel.prefill`. Shorter chunks are padded on the right, as in `OnnxLogits`."""
        input_ids, rows = padded(chunks)
        return self.forward(input_ids, past=np.full(len(chunks), past), rows=rows, first_slot=first_slot)

    def decode(self, token_ids: TokenArray, past: TokenArray) -> LogitsArray:
        """See `LogitsModel.decode`."""
        return self.forward(token_ids[:, np.newaxis], past=past, rows=np.arange(len(token_ids)))

    def move(self, *, source: int, target: int, length: int) -> None:
        """See `LogitsModel.move`."""
        super().move(source=source, target=target, length=length)
        self._spoiled[target] = max(self._spoiled[target], min(self._spoiled[source], length))

    def forward(self, input_ids: TokenArray, *, past: Any, rows: Any, first_slot: int = 0) -> LogitsArray:
        """Run ids [batch, sequence] after `past` tokens of each row, in the slots from `first_slot` on.

        Returns:
            [len(rows), vocab_size]: logits of those of the batch * sequence hidden rows.
        """
        arrays = [np.asarray(array, dtype=np.int64) for array in (input_ids, past, rows)]
        ends = arrays[1] + input_ids.shape[1]
        slots = slice(first_slot, first_slot + len(input_ids))
        self._forget(slots, ends)
        # Only as far as the longest row goes: attention computes all that it is given.
        cache = self._kv_cache[slots, ..., : ends.max(), :]
        inputs = [self._torch.from_numpy(array).to(self._device) for array in arrays]
        with self._torch.inference_mode():
            logits = self._module(*inputs, cache)
        failed = arrays[2][logits[:, 0].isnan().cpu().numpy()] // input_ids.shape[1]
        self._spoiled[slots][failed] = ends[failed]
        # What inference mode made, torch lets nobody change; a decoding loop may.
        return logits.numpy() if self._is_host else logits.clone()

    def _forget(self, slots: slice, ends: TokenArray) -> None:
        """Empty what a row that failed has left behind the end of the row that has its slot now.

        A mask hides it from attention, which does not help: 0 * NaN is NaN.
        """
        spoiled = self._spoiled[slots]
        for row in np.flatnonzero(spoiled > ends):
            self._kv_cache[slots.start + row, ..., ends[row] : spoiled[row], :] = 0
            spoiled[row] = ends[row]


def _load(path: Path, torch: Any, *, device: Any) -> tuple[Any, dict[str, str]]:
    files = {"genserve.json": ""}
    try:
        with warnings.catch_warnings():
            # torch recommends torch.export to those who write models; those who serve them get what they get.
            warnings.simplefilter("ignore", DeprecationWarning)
            module = torch.jit.load(str(path), map_location=device, _extra_files=files).eval()
        return module, json.loads(files["genserve.json"] or "{}")
    except Exception as error:  # torch raises RuntimeError, ValueError, pickle's errors
        raise RepositoryError(
            f"{path} cannot be loaded: {error}", remedy="export it again with `genserve export --overwrite`"
        ) from error


def _sizes(metadata: dict[str, str], path: Path) -> list[int]:
    names = ("context_length", "num_layers", "num_kv_heads", "head_dim", "vocab_size")
    try:
        return [int(metadata[f"genserve.{name}"]) for name in names]
    except (KeyError, ValueError) as error:
        raise RepositoryError(
            f"{path} does not tell the sizes of its KV cache: {error}",
            remedy="make it with `genserve export --format torchscript`; a graph without a cache has no "
            "`sequence_batching` in its config.pbtxt",
        ) from error
