"""A logits model over a real, tiny KV cache: its logits depend on the contents of the blocks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from genserve.engine.logits_model import ForwardBatch
from genserve.sampling.logits_array import FloatArray

VOCAB_SIZE = 64


def logits_after(token_ids: Sequence[int]) -> FloatArray:
    """Return the logits that any correct engine gets after these tokens; they differ for every history."""
    return _row_after(tuple(token_ids))


@lru_cache(maxsize=1 << 16)
def _row_after(token_ids: tuple[int, ...]) -> FloatArray:
    seed = zlib.crc32(repr(token_ids).encode())
    row = np.random.Generator(np.random.PCG64(seed)).standard_normal(VOCAB_SIZE, dtype=np.float32)
    row.setflags(write=False)
    return row


def greedy_answer(prompt: Sequence[int], *, num_tokens: int) -> list[int]:
    """Return the answer of a plain loop without an engine."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(np.argmax(logits_after(token_ids))))
    return token_ids[len(prompt) :]


class PagedLogits:
    """Implements `LogitsModel` and `BlockMemory`; a block holds each token and a digest of all before it."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 4,
        max_length: int = 64,
        block_size: int = 4,
        num_blocks: int | None = None,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_length = max_length
        self.block_size = block_size
        blocks_per_sequence = -(-max_length // block_size)
        self.num_blocks = num_blocks or max_num_seqs * blocks_per_sequence
        assert self.num_blocks >= blocks_per_sequence, "the longest sequence must fit"
        self.vocab_size = vocab_size
        self.num_state_slots = 0
        self.forwards: list[tuple[int, ...]] = []   # the number of tokens of each sequence in each forward
        self.copies: list[tuple[int, int]] = []
        # Failures by token id: "nan" for the rows of its sequence, or "raise" for the forward.
        self.poison: dict[int, str] = {}
        self.buffer: FloatArray = np.zeros((0, vocab_size), dtype=np.float32)
        self._tokens = np.full((self.num_blocks, block_size), -1)
        self._digests = np.zeros((self.num_blocks, block_size), dtype=np.int64)

    def forward(self, batch: ForwardBatch) -> FloatArray:
        starts = batch.query_start_loc.tolist()
        counts = tuple(end - start for start, end in pairwise(starts))
        self._check(batch, counts)
        self.forwards.append(counts)
        written: set[tuple[int, int]] = set()
        for row, num_computed in enumerate(batch.num_computed_tokens.tolist()):
            digest = int(self._digests[self._place(batch, row, num_computed - 1)]) if num_computed else 0
            for offset, token_id in enumerate(batch.token_ids[starts[row] : starts[row + 1]].tolist()):
                place = self._place(batch, row, num_computed + offset)
                assert batch.positions[starts[row] + offset] == num_computed + offset
                assert place not in written, "two tokens are written to one place"
                written.add(place)
                digest = digest_after(digest, token_id)
                self._tokens[place], self._digests[place] = token_id, digest
        self.buffer = np.zeros((len(batch.logits_indices), self.vocab_size), dtype=np.float32)
        for index, token in enumerate(batch.logits_indices.tolist()):
            row = next(row for row, end in enumerate(starts[1:]) if token < end)
            self.buffer[index] = self._row(batch, row, int(batch.positions[token]) + 1)
        return self.buffer

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.copies.append((source, target))
            self._tokens[target] = self._tokens[source]
            self._digests[target] = self._digests[source]

    @property
    def block_bytes(self) -> int:
        return 2 * 8 * self.block_size

    @property
    def state_bytes(self) -> int:
        return 8 if self.num_state_slots else 0

    def read_states(self, slots: Sequence[int], rows: NDArray[np.uint8]) -> None:
        raise AssertionError("the model has no states")

    def write_states(self, slots: Sequence[int], rows: NDArray[np.uint8]) -> None:
        raise AssertionError("the model has no states")

    def read_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        rows.view(np.int64)[:] = np.concatenate([self._tokens[block_ids], self._digests[block_ids]], axis=1)

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        self._tokens[block_ids], self._digests[block_ids] = np.split(rows.view(np.int64), 2, axis=1)

    def _check(self, batch: ForwardBatch, counts: tuple[int, ...]) -> None:
        arrays = [batch.token_ids, batch.positions, batch.query_start_loc, batch.num_computed_tokens]
        arrays += [batch.block_table, batch.logits_indices]
        assert all(array.flags.c_contiguous for array in arrays)
        assert [array.dtype for array in arrays] == [np.int64, np.int64, *[np.int32] * 3, np.int64]
        assert 1 <= len(counts) <= self.max_num_seqs
        assert min(counts) >= 1
        assert batch.block_table.shape[0] == len(batch.num_computed_tokens) == len(counts)
        assert len(batch.token_ids) == len(batch.positions) == sum(counts)
        assert np.all(np.diff(batch.logits_indices) > 0)
        assert all(n + m <= self.max_length for n, m in zip(batch.num_computed_tokens, counts, strict=True))

    def _place(self, batch: ForwardBatch, row: int, position: int) -> tuple[int, int]:
        return int(batch.block_table[row, position // self.block_size]), position % self.block_size

    def _row(self, batch: ForwardBatch, row: int, length: int) -> FloatArray:
        blocks = batch.block_table[row, : -(-length // self.block_size)]
        tokens, digests = self._tokens[blocks].ravel()[:length], self._digests[blocks].ravel()[:length]
        digest, size = 0, self.block_size
        for first in range(0, length, size):
            digest = zlib.crc32(tokens[first : first + size].tobytes(), digest)
            assert digests[first : first + size][-1] == digest, "a block was computed behind other tokens"
        history = tokens.tolist()
        for token_id, effect in self.poison.items():
            if token_id in history and effect == "raise":
                raise RuntimeError("poisoned")
            if token_id in history:
                return np.full(self.vocab_size, np.nan, dtype=np.float32)
        return self.row_after(history)

    def row_after(self, history: Sequence[int]) -> FloatArray:
        """The logits of a model: those of `logits_after`, unless a subclass has others."""
        return logits_after(history)


def digest_after(before: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(8, "little"), before)
