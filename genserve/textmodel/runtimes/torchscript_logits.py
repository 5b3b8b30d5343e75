"""TorchScript logits: a traced decoder over a paged KV cache, which it writes in place."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from genserve.backends.libraries import import_torch
from genserve.engine.logits_model import ForwardBatch
from genserve.errors import RepositoryError
from genserve.sampling.logits_array import LogitsArray
from genserve.textmodel.runtimes.cached_logits import (
    EXPORT_AGAIN,
    CachedLogits,
    CachePart,
    CacheSizes,
    part_of,
)
from genserve.textmodel.runtimes.kv_cache_memory import HostMemory, LogitsMemory

_CACHE_TYPES = {"fp32": np.float32, "fp16": np.float16}     # by the precision of the export


class TorchLogits(CachedLogits):
    """A `model.pt` of `genserve export`; implements `engine.LogitsModel`. Used by one thread.

    Attributes:
        metadata: the metadata that the exporter has written into the file.
    """

    def __init__(
        self, path: Path, *, memory: LogitsMemory | None = None, **sizes: Unpack[CacheSizes]
    ) -> None:
        """Load the module.

        Args:
            path: the model.pt.
            memory: the memory of the device that runs it, which has the logits too; None: the host's.
            sizes: the bounds of the KV cache.

        Raises:
            MissingDependency: PyTorch is not installed.
            RepositoryError: the file cannot be loaded, or was not exported by `genserve export`.
        """
        self._torch = torch = import_torch()
        memory = memory or HostMemory()
        self._is_host = memory.is_host
        self._device = torch.device("cpu" if memory.is_host else f"{memory.device}:{memory.device_id}")
        self._module, self.metadata = _load(path, torch, device=self._device)
        context_length, num_layers, num_kv_heads, head_dim, self.vocab_size = _sizes(self.metadata, path)
        shape = (num_kv_heads, head_dim), np.dtype(_CACHE_TYPES[self.metadata["genserve.precision"]])
        shapes = {
            f"past_key_values.{layer}.{part}": shape
            for layer in range(num_layers)
            for part in ("key", "value")
        }
        parts = [CachePart(memory=memory, shapes=shapes)]
        super().__init__(parts, path=path, context_length=context_length, **sizes)
        self._past_key_values = [torch.as_tensor(buffer) for buffer in self.cache.buffers.values()]
        one = ForwardBatch.of([[0]], num_computed_tokens=[0], block_table=[[0]])
        for _ in range(2):  # the first two runs compile the module
            self.forward(one)

    def forward(self, batch: ForwardBatch) -> LogitsArray:
        """See `LogitsModel.forward`.

        Attention pads all sequences to the longest. So sequences share a run if their numbers of tokens are
        between the same powers of two, and a chunk of a prompt does not slow down decodes.
        """
        sizes = np.ceil(np.log2(np.diff(batch.query_start_loc)))
        with self._torch.inference_mode():
            if (sizes == sizes[0]).all():
                logits = self._run(batch)
            else:
                shape = (len(batch.logits_indices), self.vocab_size)
                logits = self._torch.empty(shape, dtype=self._torch.float32, device=self._device)
                for size in np.unique(sizes):
                    part, rows = part_of(batch, np.flatnonzero(sizes == size))
                    logits[self._torch.from_numpy(rows).to(self._device)] = self._run(part)
        # A decoding loop may write to the logits, which torch forbids for tensors of inference mode.
        return logits.numpy() if self._is_host else logits.clone()

    def _run(self, batch: ForwardBatch) -> Any:
        arrays = (
            batch.token_ids,
            batch.positions,
            batch.query_start_loc,
            batch.num_computed_tokens,
            batch.block_table,
            batch.logits_indices,
        )
        inputs = [self._torch.from_numpy(array).to(self._device) for array in arrays]
        return self._module(*inputs, self._past_key_values)


def _load(path: Path, torch: Any, *, device: Any) -> tuple[Any, dict[str, str]]:
    files = {"genserve.json": ""}
    try:
        with warnings.catch_warnings():
            # torch recommends torch.export, which is up to the authors of a model.
            warnings.simplefilter("ignore", DeprecationWarning)
            module = torch.jit.load(str(path), map_location=device, _extra_files=files).eval()
        metadata = json.loads(files["genserve.json"] or "{}")
    except Exception as error:  # torch raises RuntimeError, ValueError, pickle's errors
        raise RepositoryError(f"{path} cannot be loaded: {error}", remedy=EXPORT_AGAIN) from error
    arguments = [argument.name for argument in module.forward.schema.arguments]
    if metadata and "block_table" not in arguments:
        raise RepositoryError(
            f"{path} has no KV cache in blocks: it was exported by an older version of genserve",
            remedy=EXPORT_AGAIN,
        )
    return module, metadata


def _sizes(metadata: dict[str, str], path: Path) -> list[int]:
    names = ("context_length", "num_layers", "num_kv_heads", "head_dim", "vocab_size")
    try:
        return [int(metadata[f"genserve.{name}"]) for name in names]
    except (KeyError, ValueError) as error:
        raise RepositoryError(
            f"{path} does not contain the sizes of its KV cache: {error}",
            remedy="export it with `genserve export --format torchscript`; for a graph without a cache, "
            "leave `sequence_batching` out of its config.pbtxt",
        ) from error
