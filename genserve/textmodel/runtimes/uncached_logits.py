"""Uncached logits: any graph from token ids to logits, which computes whole sequences at each step.

It serves TorchScript modules and plain ONNX graphs, which have no KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.backends.encoder import RunFunction
from genserve.config.model_config import ModelConfig
from genserve.engine.logits_model import ForwardBatch
from genserve.errors import RepositoryError
from genserve.sampling.logits_array import FloatArray, TokenArray
from genserve.tensor import Tensor
from genserve.textmodel.logits_config import LengthLimit, LogitsNames
from genserve.textmodel.runtimes.cached_logits import part_of, rows_per_run, sequence_of_tokens, token_slots

_BLOCK_SIZE = 16
_ITEM_TYPES: Mapping[str, type[np.integer[Any]]] = {"TYPE_INT64": np.int64, "TYPE_INT32": np.int32}


class UncachedLogits:
    """A graph without a KV cache; implements `engine.LogitsModel`. Used by one thread.

    Its blocks hold token ids. A forward runs all tokens of each sequence whose logits are wanted. Rows of
    different lengths are padded on the right, where no earlier position attends.
    """

    block_size = _BLOCK_SIZE
    kv_cache_bytes = 0
    num_state_slots = 0
    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, run: RunFunction, config: ModelConfig, *, max_length: int, context_length: int = 0
    ) -> None:
        """Run the graph on two tokens, to validate it.

        Args:
            run: runs the graph.
            config: the stage's config; `max_batch_size` sequences run concurrently.
            max_length: maximum tokens of a sequence.
            context_length: the most tokens that the config allows; 0: `max_length`.

        Raises:
            RepositoryError: the config is not a logits stage's, or the graph returns other logits than
                [batch, sequence, vocabulary].
        """
        self._run = run
        self._names = LogitsNames.of(config)
        self._types = {spec.name: _item_type(spec.data_type, spec.name) for spec in config.inputs}
        self.max_num_seqs = max(1, config.max_batch_size)
        self.max_length = max_length
        self.context_length = context_length or max_length
        self.length_limit = LengthLimit.FLAG if max_length < self.context_length else LengthLimit.CONFIG
        self.num_blocks = self.max_num_seqs * -(-max_length // _BLOCK_SIZE)
        self._token_ids = np.zeros((self.num_blocks, _BLOCK_SIZE), dtype=np.int64)
        width = min(2, max_length)
        logits = self._logits(np.zeros((1, width), dtype=np.int64), np.array([width]))
        if logits.ndim != 3 or logits.shape[:2] != (1, width) or logits.dtype.kind != "f":
            raise RepositoryError(
                f"model '{config.name}' returns {logits.dtype} {list(logits.shape)} for {width} tokens",
                remedy=f"change it to return the logits of every position: float32 [1, {width}, vocabulary]",
            )
        self.vocab_size: int = logits.shape[2]

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """See `LogitsModel.forward`. A chunk of a prompt without wanted logits costs no run."""
        sequences = sequence_of_tokens(batch)
        slots = token_slots(batch.block_table, sequences, batch.positions, block_size=_BLOCK_SIZE)
        self._token_ids.reshape(-1)[slots] = batch.token_ids
        rows = np.empty((len(batch.logits_indices), self.vocab_size), dtype=np.float32)
        wanted = np.unique(sequences[batch.logits_indices])
        longest = int(batch.positions[batch.logits_indices].max(initial=0)) + 1
        step = rows_per_run(longest, self.vocab_size)
        for start in range(0, len(wanted), step):
            part, of_part = part_of(batch, wanted[start : start + step])
            logits = self._logits(*self._whole(part))
            places = part.logits_indices
            rows[of_part] = logits[sequence_of_tokens(part)[places], part.positions[places]]
        return rows

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `LogitsModel.copy_blocks`."""
        for source, target in pairs:
            self._token_ids[target] = self._token_ids[source]

    def close(self) -> None:
        """Do nothing: it has no threads."""

    def _whole(self, batch: ForwardBatch) -> tuple[TokenArray, NDArray[Any]]:
        """Return all ids of the sequences of a batch [B, longest], and their lengths [B]."""
        lengths = batch.num_computed_tokens + np.diff(batch.query_start_loc)
        sequences = np.arange(len(lengths))[:, np.newaxis]
        positions = np.minimum(np.arange(lengths.max()), lengths[:, np.newaxis] - 1)
        slots = token_slots(batch.block_table, sequences, positions, block_size=_BLOCK_SIZE)
        return self._token_ids.reshape(-1)[slots], lengths

    def _logits(self, token_ids: TokenArray, lengths: NDArray[Any]) -> NDArray[Any]:
        """Run the first `lengths[i]` ids of each row; return [rows, longest, vocab_size]."""
        mask = np.arange(token_ids.shape[1]) < lengths[:, np.newaxis]
        arrays = {self._names.input_ids: np.where(mask, token_ids, 0)}
        if self._names.attention_mask is not None:
            arrays[self._names.attention_mask] = mask
        inputs = {name: Tensor(name, array.astype(self._types[name])) for name, array in arrays.items()}
        return self._run(inputs, [self._names.logits])[self._names.logits].array


def _item_type(data_type: str, name: str) -> type[np.integer[Any]]:
    if data_type not in _ITEM_TYPES:
        raise RepositoryError(
            f"the input '{name}' of a logits stage has the unsupported type {data_type}",
            remedy=f"ids and mask have one of the types {', '.join(_ITEM_TYPES)}",
        )
    return _ITEM_TYPES[data_type]
