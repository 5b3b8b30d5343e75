"""Cached sequences: token sequences in the KV cache of a logits model, run without an engine."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from genserve.generation.logits_model import ForwardBatch, LogitsModel, on_host

__all__ = ["CachedSequences"]

_VOID = 2**30   # what stands in a block table behind the last block; no model has such a block


class CachedSequences:
    """Sequences by name, in blocks of a model's cache that are taken and freed in a random order.

    Attributes:
        histories: the tokens of each sequence, all of which are in the cache.
    """

    def __init__(self, model: LogitsModel, *, seed: int = 0) -> None:
        self.histories: dict[Hashable, list[int]] = {}
        self._model = model
        self._tables: dict[Hashable, list[int]] = {}
        self._rng = random.Random(seed)
        self._free = list(range(model.num_blocks))

    def forward(
        self, new: Mapping[Hashable, Sequence[int]], *, wanted: Sequence[int] | str = "last"
    ) -> list[tuple[list[int], NDArray[np.float32]]]:
        """Append tokens to sequences, new ones among them, in one forward.

        Args:
            new: the tokens, by name.
            wanted: which of all tokens together have their logits asked for; "all", or the "last" of each.

        Returns:
            The row behind each wanted token, and before it the tokens up to this one.
        """
        histories, starts = [], [0]
        computed = [len(self.histories.get(name, ())) for name in new]
        for name, token_ids in new.items():
            history = self.histories.setdefault(name, [])
            for token_id in token_ids:
                history.append(token_id)
                histories.append(list(history))
            self._take(name)
            starts.append(len(histories))
        if wanted == "all":
            wanted = range(len(histories))
        elif wanted == "last":
            wanted = [start - 1 for start in starts[1:]]
        tables = [self._tables[name] for name in new]
        table = np.full((len(new), max(map(len, tables)) + 1), _VOID, dtype=np.int32)
        for row, blocks in zip(table, tables, strict=True):
            row[: len(blocks)] = blocks
        batch = ForwardBatch(
            token_ids=np.array([history[-1] for history in histories]),
            positions=np.array([len(history) - 1 for history in histories]),
            query_start_loc=np.array(starts, dtype=np.int32),
            num_computed_tokens=np.array(computed, dtype=np.int32),
            block_table=table,
            logits_indices=np.array(wanted, dtype=np.int64),
        )
        logits = on_host(self._model.forward(batch))
        assert logits.shape == (len(wanted), self._model.vocab_size)
        assert logits.dtype == np.float32
        return [(histories[index], row.copy()) for index, row in zip(wanted, logits, strict=True)]

    def shorten(self, name: Hashable, length: int) -> None:
        """Forget the tokens of a sequence from the `length`-th on, as those of a draft that was wrong."""
        del self.histories[name][length:]
        self._give_back(name)

    def copy(self, source: Hashable, *targets: Hashable, length: int) -> None:
        """Begin sequences with the first tokens of another: the first in copies of its blocks, the second in
        copies of these, and so on.
        """
        pairs = []
        for before, target in pairwise((source, *targets)):
            self.histories[target] = self.histories[source][:length]
            self._take(target)
            pairs += zip(self._tables[before], self._tables[target], strict=False)
        self._model.copy_blocks(pairs)

    def _take(self, name: Hashable) -> None:
        table = self._tables.setdefault(name, [])
        while len(table) * self._model.block_size < len(self.histories[name]):
            table.append(self._free.pop(self._rng.randrange(len(self._free))))

    def _give_back(self, name: Hashable) -> None:
        table, num_kept = self._tables[name], -(-len(self.histories[name]) // self._model.block_size)
        self._free += table[num_kept:]
        del table[num_kept:]
