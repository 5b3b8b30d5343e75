"""Logits model of a simulation: its rows follow from all cached tokens, so a wrong block changes the text."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random

import numpy as np
from numpy.typing import NDArray

from genserve.engine.logits_model import ForwardBatch
from genserve.sampling.logits_array import FloatArray
from tests.simulation.virtual_threads import VirtualThreads

VOCAB_SIZE = 32
_NUM_ROWS = 4096
_ROWS = np.random.Generator(np.random.PCG64(7)).standard_normal((_NUM_ROWS, VOCAB_SIZE), dtype=np.float32)
_ROWS[:, -2:] -= 100  # the tokens that only prompts have
_BEST = _ROWS.argmax(axis=1).tolist()
_SPOILT = 0xDEAD

# Sequences that contain this token get rows of NaN.
NAN_TOKEN = VOCAB_SIZE - 1


class FailedForward(Exception):
    """A forward that was made to fail."""


@lru_cache(maxsize=1 << 14)
def _state_after(token_ids: tuple[int, ...]) -> tuple[bytes, int]:
    """Return the cache's contents for these tokens, and the digest of the last one."""
    if not token_ids:
        return b"", 0
    before, digest = _state_after(token_ids[:-1])
    digest = zlib.crc32(token_ids[-1].to_bytes(4, "little"), digest)
    return before + digest.to_bytes(4, "little"), digest


def row_after(token_ids: Sequence[int]) -> FloatArray:
    """Return the read-only logits that any correct engine gets after these tokens."""
    if NAN_TOKEN in token_ids:
        return np.full(VOCAB_SIZE, np.nan, dtype=np.float32)
    return _ROWS[zlib.crc32(_state_after(tuple(token_ids))[0]) % _NUM_ROWS]


def best_after(token_ids: Sequence[int]) -> int:
    """Return the most likely token after these tokens."""
    return _BEST[zlib.crc32(_state_after(tuple(token_ids))[0]) % _NUM_ROWS]


class SimulatedLogits:
    """Implements `LogitsModel` and `BlockMemory`. A place in the cache has the digest of all tokens up to it.

    With state slots, a sequence's digest goes on from its state. A forward takes virtual time, during which
    other threads run. The bytes of blocks and states in files depend on `weights` too.
    """

    def __init__(
        self,
        threads: VirtualThreads,
        rng: Random,
        *,
        max_num_seqs: int,
        max_length: int,
        block_size: int,
        num_blocks: int,
        num_state_slots: int,
        failure_rate: float,
        on_failure: Callable[[], None],
        weights: int = 0,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_length = max_length
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.vocab_size = VOCAB_SIZE
        self.num_state_slots = num_state_slots
        self.states = np.zeros(num_state_slots, dtype=np.uint32)
        self.failure_rate = failure_rate
        self.cache = np.zeros((num_blocks, block_size), dtype=np.uint32)
        self._nan_blocks = np.zeros((num_blocks, block_size), dtype=bool)
        self._threads = threads
        self._rng = rng
        self._on_failure = on_failure
        self._weights = np.uint8(weights)
        self._step_s = rng.choice([0.001, 0.01, 0.05])
        self._token_s = rng.choice([0.0, 0.0001, 0.001])

    def longest_step_s(self, num_tokens: int) -> float:
        """Return how long a forward takes at most."""
        return self._threads.on_grid(int((self._step_s + self._token_s * num_tokens) * 1e9)) / 1e9

    def forward(self, batch: ForwardBatch) -> FloatArray:
        self._threads.sleep(self._step_s + self._token_s * len(batch.token_ids))
        states = self._read_states(batch)
        self._fail_sometimes(self.failure_rate)
        starts = batch.query_start_loc.tolist()
        token_ids, size = batch.token_ids.tolist(), self.block_size
        cache, poisoned = self.cache, self._nan_blocks
        for row, num_computed in enumerate(batch.num_computed_tokens.tolist()):
            table = batch.block_table[row]
            digest = states[row] if states else 0
            if num_computed and not states:
                digest = int(cache[table[(num_computed - 1) // size], (num_computed - 1) % size])
            for place, token_id in enumerate(token_ids[starts[row] : starts[row + 1]], num_computed):
                digest = zlib.crc32(token_id.to_bytes(4, "little"), digest)
                block = table[place // size]
                cache[block, place % size] = digest
                poisoned[block, place % size] = token_id == NAN_TOKEN
            if batch.state_target is not None:
                self.states[batch.state_target[row]] = digest
        rows = np.empty((len(batch.logits_indices), VOCAB_SIZE), dtype=np.float32)
        row = 0
        for index, token in enumerate(batch.logits_indices.tolist()):
            while token >= starts[row + 1]:
                row += 1
            length = int(batch.positions[token]) + 1
            blocks = batch.block_table[row, : -(-length // size)]
            digest = zlib.crc32(cache[blocks].tobytes()[: 4 * length])
            rows[index] = _ROWS[digest % _NUM_ROWS]
            if poisoned[blocks].ravel()[:length].any():
                rows[index] = np.nan
        return rows

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._fail_sometimes(10 * self.failure_rate)  # since copies are rare
        for source, target in pairs:
            self.cache[target] = self.cache[source]
            self._nan_blocks[target] = self._nan_blocks[source]

    def block_after(self, token_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Return the block that ends with the last of these tokens, as weights of 0 write it."""
        digests = _state_after(tuple(token_ids))[0][-4 * self.block_size :]
        return np.frombuffer(digests.ljust(self.block_bytes, b"\0"), np.uint8)

    def state_after(self, token_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Return the state after these tokens, as weights of 0 write it."""
        digest = _state_after(tuple(token_ids))[1]
        return np.frombuffer(digest.to_bytes(4, "little"), np.uint8)

    @property
    def block_bytes(self) -> int:
        return self.block_size * (self.cache.itemsize + self._nan_blocks.itemsize)

    @property
    def state_bytes(self) -> int:
        return self.states.itemsize if self.num_state_slots else 0

    def read_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        chosen = list(block_ids)
        parts = [self.cache[chosen].view(np.uint8), self._nan_blocks[chosen].view(np.uint8)]
        rows[:] = np.concatenate(parts, axis=1) ^ self._weights

    def write_blocks(self, block_ids: Sequence[int], rows: NDArray[np.uint8]) -> None:
        digests, poisoned = np.split(rows ^ self._weights, [self.block_size * self.cache.itemsize], axis=1)
        self.cache[list(block_ids)] = np.ascontiguousarray(digests).view(np.uint32)
        self._nan_blocks[list(block_ids)] = poisoned != 0

    def read_states(self, slots: Sequence[int], rows: NDArray[np.uint8]) -> None:
        rows[:] = self.states[list(slots), np.newaxis].view(np.uint8) ^ self._weights

    def write_states(self, slots: Sequence[int], rows: NDArray[np.uint8]) -> None:
        self.states[list(slots)] = (rows ^ self._weights).view(np.uint32)[:, 0]

    def holds(self, block_ids: Sequence[int], token_ids: Sequence[int]) -> bool:
        """Whether the cache has the states of these tokens in these blocks."""
        cached = self.cache[list(block_ids)].tobytes()[: 4 * len(token_ids)]
        return cached == _state_after(tuple(token_ids))[0]

    def holds_state(self, slot: int, token_ids: Sequence[int]) -> bool:
        """Whether the slot has the state after these tokens."""
        return self.states[slot] == _state_after(tuple(token_ids))[1]

    def _read_states(self, batch: ForwardBatch) -> list[int]:
        """Return the state of each sequence, and spoil the targets, as a forward that fails does."""
        if batch.state_source is None:
            return []
        sources = batch.state_source.tolist()
        states = [int(self.states[slot]) if slot >= 0 else 0 for slot in sources]
        self.states[batch.state_target] = _SPOILT
        return states

    def _fail_sometimes(self, rate: float) -> None:
        if self._rng.random() < rate:
            self._on_failure()
            raise self._rng.choice([FailedForward, MemoryError])("injected")
