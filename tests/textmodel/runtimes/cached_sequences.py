"""Cached sequences: token sequences by name in the KV cache of a logits model, run without an engine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from genserve.engine.logits_model import LogitsModel
from tests.export.rows import BlockPool, Row

__all__ = ["CachedSequences"]


class CachedSequences:
    """Sequences that grow, shrink and are copied, in randomly ordered blocks of a model's cache."""

    def __init__(self, model: LogitsModel, *, seed: int = 0) -> None:
        self._pool = BlockPool(model, seed=seed)
        self._rows: dict[Hashable, Row] = {}

    def history(self, name: Hashable) -> list[int]:
        """The tokens of a sequence, all of which are in the cache."""
        return self._row(name).ids.tolist()

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
        rows = [self._row(name) for name in new]
        lengths = [len(token_ids) for token_ids in new.values()]
        histories = []
        for row, token_ids in zip(rows, new.values(), strict=True):
            row.ids = np.concatenate([row.ids, np.array(token_ids, np.int64)])
            histories += [row.ids[: end + 1].tolist() for end in range(row.num_computed, len(row.ids))]
        if wanted == "all":
            wanted = range(len(histories))
        elif wanted == "last":
            wanted = (np.cumsum(lengths) - 1).tolist()
        logits = self._pool.logits(rows, lengths=lengths, wanted=wanted)
        return [(histories[index], row) for index, row in zip(wanted, logits, strict=True)]

    def shorten(self, name: Hashable, length: int) -> None:
        """Forget the tokens of a sequence from the `length`-th on, as those of a draft that was wrong."""
        row = self._row(name)
        row.ids = row.ids[:length]
        self._pool.shorten(row, length)

    def copy(self, source: Hashable, *targets: Hashable, length: int) -> None:
        """Begin sequences with the first tokens of another: the first in copies of its blocks, the second in
        copies of these, and so on.
        """
        pairs = []
        for before, target in pairwise(map(self._row, (source, *targets))):
            target.ids, target.num_computed = before.ids[:length], length
            self._pool.take(target, length)
            pairs += zip(before.blocks, target.blocks, strict=False)
        self._pool.model.copy_blocks(pairs)

    def _row(self, name: Hashable) -> Row:
        return self._rows.setdefault(name, Row(np.zeros(0, np.int64)))
