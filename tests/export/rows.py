"""Rows: sequences in the blocks of a logits model, run in any batches and chunks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from genserve.engine.logits_model import ForwardBatch, LogitsModel
from genserve.sampling.logits_array import on_host

__all__ = ["BlockPool", "Row", "forward_batch", "logits_of"]

VOID = 2**30    # fills block tables after the last block; no model has such a block


@dataclass(slots=True)
class Row:
    """A sequence: all its token ids, how many of them are computed, and its blocks."""

    ids: NDArray[np.int64]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    state: int = -1     # the slot of its recurrent state; -1: it has none

    @property
    def num_left(self) -> int:
        return len(self.ids) - self.num_computed


class BlockPool:
    """The blocks of a model, allocated in order, or at random."""

    def __init__(self, model: LogitsModel, *, seed: int | None = None) -> None:
        self.model = model
        self.free = list(range(model.num_blocks))[::-1]
        self.free_slots = list(range(model.num_state_slots))
        if seed is not None:
            random.Random(seed).shuffle(self.free)
            random.Random(seed).shuffle(self.free_slots)

    def forward(self, rows: Sequence[Row], *, lengths: Sequence[int]) -> list[NDArray[np.float32]]:
        """Run the next tokens of each row in one forward: logits [length, vocab] of each."""
        logits = self.logits(rows, lengths=lengths, wanted=range(sum(lengths)))
        return np.split(logits, np.cumsum(lengths)[:-1])

    def logits(
        self, rows: Sequence[Row], *, lengths: Sequence[int], wanted: Sequence[int]
    ) -> NDArray[np.float32]:
        """Run the next tokens of each row, with logits of the wanted ones: [len(wanted), vocab]."""
        for row, length in zip(rows, lengths, strict=True):
            self.take(row, row.num_computed + length)
        # Each forward writes other slots than the last one, as after a snapshot.
        targets = [self.free_slots.pop() for _ in rows] if self.model.num_state_slots else None
        batch = forward_batch(rows, lengths, wanted, targets=targets)
        logits = on_host(self.model.forward(batch)).copy()
        for row, target in zip(rows, targets or [], strict=targets is not None):
            self.end_state(row)
            row.state = target
        assert logits.shape == (len(wanted), self.model.vocab_size)
        assert logits.dtype == np.float32
        for row, length in zip(rows, lengths, strict=True):
            row.num_computed += length
        return logits

    def run(self, rows: Sequence[Row], *, length: int) -> list[NDArray[np.float32]]:
        """Run all tokens of the rows, at most `length` of each at a time: logits [tokens, vocab] of each."""
        parts: list[list[NDArray[np.float32]]] = [[] for _ in rows]
        while left := [index for index, row in enumerate(rows) if row.num_left]:
            lengths = [min(length, rows[index].num_left) for index in left]
            found = self.forward([rows[index] for index in left], lengths=lengths)
            for index, logits in zip(left, found, strict=True):
                parts[index].append(logits)
        self.end(rows)
        return [np.concatenate(part) for part in parts]

    def end(self, rows: Sequence[Row]) -> None:
        """Free the blocks of rows, without changing their contents."""
        for row in rows:
            self.shorten(row, 0)
            self.end_state(row)

    def end_state(self, row: Row) -> None:
        """Free the slot of a row's recurrent state."""
        if row.state >= 0:
            self.free_slots.insert(0, row.state)
            row.state = -1

    def take(self, row: Row, length: int) -> None:
        """Allocate the blocks of a row's first `length` tokens."""
        while len(row.blocks) * self.model.block_size < length:
            row.blocks.append(self.free.pop())

    def shorten(self, row: Row, length: int) -> None:
        """Shorten a row to `length` computed tokens, and free its other blocks."""
        row.num_computed = min(row.num_computed, length)
        num_kept = -(-length // self.model.block_size)
        self.free += row.blocks[num_kept:][::-1]
        del row.blocks[num_kept:]


def forward_batch(
    rows: Sequence[Row],
    lengths: Sequence[int],
    wanted: Sequence[int] | None = None,
    *,
    targets: Sequence[int] | None = None,
) -> ForwardBatch:
    """The next tokens of each row, with logits for the wanted ones; None: all.

    `targets` are the slots of the new recurrent states, of a model that has them.
    """
    pieces = [slice(row.num_computed, row.num_computed + n) for row, n in zip(rows, lengths, strict=True)]
    block_table = np.full((len(rows), max(len(row.blocks) for row in rows) + 1), VOID, np.int32)
    for line, row in zip(block_table, rows, strict=True):
        line[: len(row.blocks)] = row.blocks
    return ForwardBatch(
        token_ids=np.concatenate([row.ids[piece] for row, piece in zip(rows, pieces, strict=True)]),
        positions=np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces]),
        query_start_loc=np.cumsum([0, *lengths], dtype=np.int32),
        num_computed_tokens=np.array([row.num_computed for row in rows], np.int32),
        block_table=block_table,
        logits_indices=np.array(range(sum(lengths)) if wanted is None else wanted, np.int64),
        state_source=None if targets is None else np.array([row.state for row in rows], np.int32),
        state_target=None if targets is None else np.array(targets, np.int32),
    )


def logits_of(model: LogitsModel, ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
    """The logits [tokens, vocab] of a sequence alone, in one forward."""
    row = Row(np.array(ids, np.int64))
    [logits] = BlockPool(model).forward([row], lengths=[len(row.ids)])
    return logits
