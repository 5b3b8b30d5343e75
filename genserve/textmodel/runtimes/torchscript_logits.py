"""TorchScript logits: a traced decoder over a paged KV cache, which it writes in place."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from genserve.backends.libraries import import_torch
from genserve.errors import RepositoryError
from genserve.generation.logits_model import ForwardBatch, LogitsArray
from genserve.textmodel.runtimes.cached_logits import EXPORT_AGAIN, CachedLogits, part_of, resolve_max_length
from genserve.textmodel.runtimes.kv_cache_memory import HostMemory, LogitsMemory

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
        max_num_seqs: int,
        max_length: int | None = None,
        kv_cache_bytes: int | None = None,
        memory: LogitsMemory | None = None,
    ) -> None:
        """Load the module.

        Args:
            path: the model.pt.
            max_num_seqs: how many sequences can share a forward.
            max_length: tokens of a sequence; None: the module's whole context. Less, if the cache holds less.
            kv_cache_bytes: what the cache may take; None: half of what is free.
            memory: of the device that runs it; None: of the host. The logits are of its kind.

        Raises:
            MissingDependency: PyTorch is not installed.
            RepositoryError: the file cannot be loaded, or is not such a module.
        """
        self._torch = torch = import_torch()
        memory = memory or HostMemory()
        self._is_host = memory.is_host
        self._device = torch.device("cpu" if memory.is_host else f"{memory.device}:{memory.device_id}")
        self._module, self.metadata = _load(path, torch, device=self._device)
        context_length, num_layers, num_kv_heads, head_dim, self.vocab_size = _sizes(self.metadata, path)
        shape = (num_kv_heads, head_dim), np.dtype(_CACHE_TYPES[self.metadata["genserve.precision"]])
        super().__init__(
            memory,
            {
                f"past_key_values.{layer}.{part}": shape
                for layer in range(num_layers)
                for part in ("key", "value")
            },
            path=path,
            max_num_seqs=max_num_seqs,
            max_length=resolve_max_length(max_length, context_length=context_length, path=path),
            kv_cache_bytes=kv_cache_bytes,
        )
        self._past_key_values = [torch.as_tensor(buffer) for buffer in self.cache.buffers.values()]
        one = ForwardBatch.of([[0]], num_computed_tokens=[0], block_table=[[0]])
        for _ in range(2):  # the first two runs compile, which a request should not wait for
            self.forward(one)

    def forward(self, batch: ForwardBatch) -> LogitsArray:
        """See `LogitsModel.forward`.

        Attention pads the tokens of each sequence to the most that one has. So sequences whose numbers of
        tokens are between the same powers of two share a run, and a chunk of a prompt leaves decodes alone.
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
        # What inference mode made, torch lets nobody change; a decoding loop may.
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
            # torch recommends torch.export to those who write models; those who serve them get what they get.
            warnings.simplefilter("ignore", DeprecationWarning)
            module = torch.jit.load(str(path), map_location=device, _extra_files=files).eval()
        metadata = json.loads(files["genserve.json"] or "{}")
    except Exception as error:  # torch raises RuntimeError, ValueError, pickle's errors
        raise RepositoryError(f"{path} cannot be loaded: {error}", remedy=EXPORT_AGAIN) from error
    arguments = [argument.name for argument in module.forward.schema.arguments]
    if metadata and "block_table" not in arguments:
        raise RepositoryError(
            f"{path} has no KV cache in blocks: an older genserve has exported it", remedy=EXPORT_AGAIN
        )
    return module, metadata


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
