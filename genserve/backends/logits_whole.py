"""Whole logits: any graph from token ids to logits, which computes whole sequences at each step.

Such graphs are what people bring who have none with a KV cache: a TorchScript module, a plain ONNX graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.backends.logits_names import LogitsNames
from genserve.config.model_config import ModelConfig
from genserve.errors import RepositoryError
from genserve.generation.logits_model import FloatArray, TokenArray
from genserve.tensor import Tensor

__all__ = ["Run", "WholeLogits"]

Run = Callable[[Mapping[str, Tensor], Sequence[str]], Mapping[str, Tensor]]  # inputs, names of outputs

_MAX_LOGITS_BYTES = 2**28  # of one run: such a graph gives the logits of every position
_ITEM_TYPES: Mapping[str, type[np.integer[Any]]] = {"TYPE_INT64": np.int64, "TYPE_INT32": np.int32}


class WholeLogits:
    """A graph without a KV cache; implements `generation.LogitsModel`. One thread uses it.

    What it keeps for a slot are the token ids, and every step runs all of them again. Rows of different
    lengths are padded on the right, where no earlier position attends.
    """

    kv_cache_bytes = 0
    page_tokens = 1
    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(self, run: Run, config: ModelConfig, *, max_length: int) -> None:
        """Try the graph on two tokens.

        Args:
            run: the graph.
            config: of the stage; `max_batch_size` sequences run together.
            max_length: tokens per slot.

        Raises:
            RepositoryError: the config is not that of a logits stage, or the graph answers other logits than
                [batch, sequence, vocabulary].
        """
        self._run = run
        self._names = LogitsNames.of(config)
        self._types = {spec.name: _item_type(spec.data_type, spec.name) for spec in config.inputs}
        self.num_slots = max(1, config.max_batch_size)
        self.max_length = max_length
        self.max_cached_tokens = self.num_slots * max_length
        self._token_ids = np.zeros((self.num_slots, max_length), dtype=np.int64)
        width = min(2, max_length)
        logits = self._logits(self._token_ids[:1], np.array([width]))
        if logits.ndim != 3 or logits.shape[:2] != (1, width) or logits.dtype.kind != "f":
            raise RepositoryError(
                f"model '{config.name}' answers {width} tokens with {logits.dtype} {list(logits.shape)}",
                remedy=f"have it give the logits of every position: float32 [1, {width}, vocabulary]",
            )
        self.vocab_size: int = logits.shape[2]

    def prefill(self, chunks: Sequence[Sequence[int]], *, first_slot: int, past: int) -> FloatArray:
        """See `LogitsModel.prefill`."""
        for slot, chunk in enumerate(chunks, start=first_slot):
            self._token_ids[slot, past : past + len(chunk)] = chunk
        lengths = past + np.array([len(chunk) for chunk in chunks])
        return self._last_rows(self._token_ids[first_slot : first_slot + len(chunks)], lengths)

    def decode(self, token_ids: TokenArray, past: TokenArray) -> FloatArray:
        """See `LogitsModel.decode`."""
        num_rows = len(token_ids)
        self._token_ids[np.arange(num_rows), past] = token_ids
        return self._last_rows(self._token_ids[:num_rows], past + 1)

    def move(self, *, source: int, target: int, length: int) -> None:
        """See `LogitsModel.move`."""
        self._token_ids[target, :length] = self._token_ids[source, :length]

    def give_back(self, slot: int, *, length: int) -> None:
        """See `LogitsModel.give_back`: ids are kept, they are few."""

    def _last_rows(self, token_ids: TokenArray, lengths: TokenArray) -> FloatArray:
        """Return the logits [rows, vocab_size] after the last token of each row, by as few runs as fit."""
        row_bytes = int(lengths.max()) * self.vocab_size * 4
        step = max(1, _MAX_LOGITS_BYTES // row_bytes)
        last = np.empty((len(lengths), self.vocab_size), dtype=np.float32)
        for start in range(0, len(lengths), step):
            part = lengths[start : start + step]
            logits = self._logits(token_ids[start : start + step], part)
            last[start : start + step] = logits[np.arange(len(part)), part - 1]
        return last

    def _logits(self, token_ids: TokenArray, lengths: TokenArray) -> NDArray[Any]:
        """Run the first `lengths[i]` ids of each row; returns [rows, the longest length, vocab_size]."""
        mask = np.arange(lengths.max()) < lengths[:, np.newaxis]
        arrays = {self._names.input_ids: np.where(mask, token_ids[:, : mask.shape[1]], 0)}
        if self._names.attention_mask is not None:
            arrays[self._names.attention_mask] = mask
        inputs = {name: Tensor(name, array.astype(self._types[name])) for name, array in arrays.items()}
        return self._run(inputs, [self._names.logits])[self._names.logits].array


def _item_type(data_type: str, name: str) -> type[np.integer[Any]]:
    if data_type not in _ITEM_TYPES:
        raise RepositoryError(
            f"the input '{name}' of a logits stage is of {data_type}",
            remedy=f"known for ids and mask: {', '.join(_ITEM_TYPES)}",
        )
    return _ITEM_TYPES[data_type]
