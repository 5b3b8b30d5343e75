"""Growing logits: a traced graph, whose KV cache grows by copying, over a cache in blocks.

This is the interface of `torch.onnx.export` and of Optimum: `input_ids`, `attention_mask`, `position_ids` and
`past_key_values.{i}.key` and `.value` in, `logits` and `present.{i}...` out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from genserve.backends.onnx_session import Provider, open_session
from genserve.engine.logits_model import ForwardBatch
from genserve.errors import RepositoryError
from genserve.sampling.logits_array import FloatArray, TokenArray
from genserve.textmodel.runtimes.cached_logits import (
    CachedLogits,
    CachePart,
    CacheSizes,
    part_of,
    rows_per_run,
    token_slots,
)
from genserve.textmodel.runtimes.kv_cache_memory import HostMemory

_DEFAULT_LENGTH = 1024  # tokens, if neither file nor config has a length
_CACHE_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class GrowingLogits(CachedLogits):
    """A graph that takes the past of sequences and returns it with the new tokens; a `LogitsModel`.

    Each run gets a copy of the blocks of its sequences, padded on the left so that all pasts end at the same
    position, as in transformers. Sequences with the same number of new tokens share a run. Used by one
    thread.

    Attributes:
        metadata: the metadata that the exporter has written into the graph.
    """

    def __init__(
        self,
        path: Path,
        *,
        parameters: Mapping[str, str] | None = None,
        providers: Sequence[Provider] = HostMemory.providers,
        **sizes: Unpack[CacheSizes],
    ) -> None:
        """Load the graph.

        Args:
            path: the model.onnx, with its weights in the same folder.
            parameters: the parameters in the config, see `open_session`.
            providers: execution providers; the cache stays in the memory of the host.
            sizes: the bounds of the KV cache.

        Raises:
            MissingDependency: ONNX Runtime is not installed.
            RepositoryError: the file cannot be loaded, or the graph has other inputs or outputs.
        """
        self._session = open_session(path, parameters=parameters or {}, graph_level=0, providers=providers)
        self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        inputs = {i.name: i for i in self._session.get_inputs()}
        past = [name for name in inputs if name.startswith("past_key_values.")]
        self._outputs = ["logits", *(name.replace("past_key_values", "present") for name in past)]
        outputs = {o.name: o for o in self._session.get_outputs()}
        self._arguments = inputs.keys() - set(past)
        unknown = self._arguments - {"input_ids", "attention_mask", "position_ids"}
        if not past or unknown or not outputs.keys() >= set(self._outputs):
            raise RepositoryError(
                f"{path} is not a graph with a KV cache that grows: its inputs are {', '.join(inputs)}",
                remedy="export it with `genserve export`",
            )
        self.vocab_size = int(outputs["logits"].shape[-1])
        exported_length = int(self.metadata.get("genserve.context_length", 0))
        context_length = exported_length or sizes.get("max_length") or _DEFAULT_LENGTH
        shapes = {name: _token_shape(inputs[name], path) for name in past}
        parts = [CachePart(memory=HostMemory(), shapes=shapes)]
        super().__init__(parts, path=path, context_length=context_length, **sizes)

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """See `LogitsModel.forward`."""
        rows = np.empty((len(batch.logits_indices), self.vocab_size), dtype=np.float32)
        for sequences in self._runs(np.diff(batch.query_start_loc)):
            part, of_part = part_of(batch, sequences)
            rows[of_part] = self._run(part)
        return rows

    def _runs(self, num_tokens: Any) -> Iterator[TokenArray]:
        """Yield the sequences of each run, given the number of new tokens of each sequence of a forward."""
        for width in np.unique(num_tokens):
            sequences, step = np.flatnonzero(num_tokens == width), rows_per_run(int(width), self.vocab_size)
            yield from (sequences[start : start + step] for start in range(0, len(sequences), step))

    def _run(self, batch: ForwardBatch) -> FloatArray:
        """Run sequences that have the same number of new tokens; see `LogitsModel.forward`."""
        num_seqs, computed = len(batch.num_computed_tokens), batch.num_computed_tokens[:, np.newaxis]
        ids, positions = (array.reshape(num_seqs, -1) for array in (batch.token_ids, batch.positions))
        width, longest = ids.shape[1], computed.max()
        padding = longest - computed    # on the left of each row
        arguments = {
            "input_ids": ids,
            "attention_mask": (np.arange(longest + width) >= padding).astype(np.int64),
            "position_ids": positions,
        }
        feed = {name: array for name, array in arguments.items() if name in self._arguments}
        past = np.arange(longest) - padding
        sequences = np.arange(num_seqs)[:, np.newaxis]
        slots, new_slots = (
            token_slots(batch.block_table, sequences, places, block_size=self.block_size)
            for places in (np.maximum(past, 0), positions)
        )
        lines = {name: buffer.reshape(-1, *buffer.shape[2:]) for name, buffer in self.cache.buffers.items()}
        for name, line in lines.items():
            copied = line[slots]
            copied[past < 0] = 0
            feed[name] = np.ascontiguousarray(copied.swapaxes(1, 2))
        logits, *presents = self._session.run(self._outputs, feed)
        for line, present in zip(lines.values(), presents, strict=True):
            line[new_slots] = present[:, :, longest:].swapaxes(1, 2)
        chosen: FloatArray = logits.reshape(-1, self.vocab_size)[batch.logits_indices]
        return chosen


def _token_shape(past: Any, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape [kv_heads, head_dim] and the type of a token in an input of the past."""
    match past.shape:
        case [_, int(kv_heads), _, int(head_dim)] if past.type in _CACHE_TYPES:
            return (kv_heads, head_dim), np.dtype(_CACHE_TYPES[past.type])
        case _:
            raise RepositoryError(
                f"{path} has an unsupported KV cache: {past.name} is {past.type} {past.shape}",
                remedy="export it with `genserve export`, or with inputs [batch, kv_heads, length, head_dim] "
                f"of {' or '.join(_CACHE_TYPES)} with fixed kv_heads and head_dim",
            )
