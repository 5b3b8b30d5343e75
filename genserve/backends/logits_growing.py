"""Growing logits: a traced graph, whose KV cache grows by copying, as a logits model with slots.

This is the interface of `torch.onnx.export` and of Optimum: `input_ids`, `attention_mask`, `position_ids` and
`past_key_values.{i}.key` and `.value` in, `logits` and `present.{i}...` out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.backends.cached_logits import CachedLogits, padded, slot_length
from genserve.backends.logits_memory import HostMemory
from genserve.backends.logits_onnx import cache_layer
from genserve.backends.onnx_session import Provider, open_session
from genserve.errors import RepositoryError
from genserve.generation.logits_model import FloatArray, TokenArray

__all__ = ["GrowingLogits"]

_DEFAULT_LENGTH = 1024  # tokens, if neither file nor config says


class GrowingLogits(CachedLogits):
    """A graph that is given the past and answers the past with one token more; a `LogitsModel`.

    Slots are kept as `OnnxLogits` keeps them. Each run is given a copy in which the pasts of all rows end at
    the same place, with padding on the left, as transformers has it. One thread uses it.

    Attributes:
        metadata: what the exporter wrote into the graph.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_slots: int,
        max_length: int | None = None,
        cache_bytes: int | None = None,
        parameters: Mapping[str, str] | None = None,
        providers: Sequence[Provider] = HostMemory.providers,
    ) -> None:
        """Load the graph.

        Args:
            path: the model.onnx; its weights lie beside it.
            num_slots: how many token sequences may run together.
            max_length: tokens per slot; None: the graph's whole context. Less, if the cache holds less.
            cache_bytes: what the cache may hold of all slots together; None: all of it.
            parameters: of the config, see `open_session`.
            providers: what runs it; the cache stays in the memory of the host.

        Raises:
            MissingDependency: ONNX Runtime is not installed.
            RepositoryError: the file cannot be loaded, or is not such a graph.
        """
        self._session = open_session(path, parameters=parameters or {}, graph_level=0, providers=providers)
        self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        inputs = {i.name: i for i in self._session.get_inputs()}
        self._past = [name for name in inputs if name.startswith("past_key_values.")]
        self._outputs = ["logits", *(name.replace("past_key_values", "present") for name in self._past)]
        outputs = {o.name: o for o in self._session.get_outputs()}
        self._arguments = inputs.keys() - set(self._past)
        unknown = self._arguments - {"input_ids", "attention_mask", "position_ids"}
        if not self._past or unknown or not outputs.keys() >= set(self._outputs):
            raise RepositoryError(
                f"{path} has no KV cache that grows: its inputs are {', '.join(inputs)}",
                remedy="make it with `genserve export`",
            )
        self.vocab_size = int(outputs["logits"].shape[-1])
        context_length = int(self.metadata.get("genserve.context_length", 0))
        super().__init__(
            HostMemory(),
            {name: cache_layer(inputs[name], path) for name in self._past},
            path=path,
            num_slots=num_slots,
            max_length=slot_length(
                max_length, context_length=context_length or max_length or _DEFAULT_LENGTH, path=path
            ),
            cache_bytes=cache_bytes,
        )

    def prefill(self, chunks: Sequence[Sequence[int]], *, first_slot: int, past: int) -> FloatArray:
        """See `LogitsModel.prefill`. Shorter chunks are padded on the right, where nothing attends to it."""
        input_ids, rows = padded(chunks)
        return self.forward(input_ids, past=np.full(len(chunks), past), rows=rows, first_slot=first_slot)

    def decode(self, token_ids: TokenArray, past: TokenArray) -> FloatArray:
        """See `LogitsModel.decode`."""
        return self.forward(token_ids[:, np.newaxis], past=past, rows=np.arange(len(token_ids)))

    def forward(self, input_ids: TokenArray, *, past: Any, rows: Any, first_slot: int = 0) -> FloatArray:
        """Run ids [batch, sequence] after `past` tokens of each row, in the slots from `first_slot` on.

        Returns:
            [len(rows), vocab_size]: logits of those of the batch * sequence rows.
        """
        (num_rows, width), lengths = input_ids.shape, np.asarray(past, dtype=np.int64)
        padding = lengths.max() - lengths   # of each row, on the left
        arguments = {
            "input_ids": np.ascontiguousarray(input_ids),
            "attention_mask": (np.arange(lengths.max() + width) >= padding[:, None]).astype(np.int64),
            "position_ids": lengths[:, None] + np.arange(width),
        }
        feed = {name: array for name, array in arguments.items() if name in self._arguments}
        slots = dict(self.cache.slots(first_slot, num_slots=num_rows))
        feed |= {name: _packed(slots[name], lengths) for name in self._past}
        logits, *presents = self._session.run(self._outputs, feed)
        for name, present in zip(self._past, presents, strict=True):
            for slot, new, length in zip(slots[name], present[:, :, -width:], lengths, strict=True):
                slot[:, length : length + width] = new
        chosen: FloatArray = logits.reshape(-1, self.vocab_size)[rows].astype(np.float32, copy=False)
        return chosen


def _packed(slots: NDArray[Any], lengths: TokenArray) -> NDArray[Any]:
    """Copy the first `lengths[i]` positions of each slot, so that all end at the same place.

    Args:
        slots: [batch, kv_heads, length, head_dim].
        lengths: [batch].

    Returns:
        [batch, kv_heads, the longest, head_dim]; zeros in front of shorter ones.
    """
    batch, heads, _, size = slots.shape
    packed = np.zeros((batch, heads, lengths.max(), size), dtype=slots.dtype)
    for row, slot, length in zip(packed, slots, lengths, strict=True):
        row[:, lengths.max() - length :] = slot[:, :length]
    return packed
