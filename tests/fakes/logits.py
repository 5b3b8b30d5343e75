"""A logits model over a real, tiny KV cache: what it answers depends on what lies in the slot."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from genserve.generation.logits_model import FloatArray, TokenArray

VOCAB_SIZE = 64


def logits_after(token_ids: Sequence[int]) -> FloatArray:
    """The row that any correct engine must see after these tokens; another history, another row."""
    return _row_after(tuple(token_ids))


@lru_cache(maxsize=1 << 16)
def _row_after(token_ids: tuple[int, ...]) -> FloatArray:
    seed = zlib.crc32(repr(token_ids).encode())
    row = np.random.Generator(np.random.PCG64(seed)).standard_normal(VOCAB_SIZE, dtype=np.float32)
    row.setflags(write=False)
    return row


def greedy_answer(prompt: Sequence[int], *, num_tokens: int) -> list[int]:
    """The answer of a plain loop without any engine."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(np.argmax(logits_after(token_ids))))
    return token_ids[len(prompt) :]


class CachedLogits:
    """Implements `LogitsModel`; the cache of a slot is the tokens that were written into it."""

    def __init__(
        self,
        *,
        num_slots: int = 4,
        max_length: int = 64,
        page_tokens: int = 4,
        max_cached_tokens: int | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.page_tokens = page_tokens
        slot_tokens = -(-max_length // page_tokens) * page_tokens
        self.max_cached_tokens = max_cached_tokens or num_slots * slot_tokens
        self.vocab_size = VOCAB_SIZE
        self.forwards: list[str] = []  # "prefill RxS" or "decode B", in order
        self.moves: list[tuple[int, int]] = []
        self.poison: dict[
            int, str
        ] = {}  # token id that, in a slot, makes its row "nan" or the forward "raise"
        self._cache = np.full((num_slots, slot_tokens), -1)
        self.prefilled = np.zeros((num_slots, slot_tokens), dtype=bool)  # positions that a prefill wrote
        self._taken = np.zeros((num_slots, slot_tokens // page_tokens), dtype=bool)  # pages
        self._buffer = np.zeros((num_slots, VOCAB_SIZE), dtype=np.float32)
        self.num_tokens = 4  # of a row of a verification
        self.max_rows = num_slots
        self._verified = np.zeros((num_slots * self.num_tokens, VOCAB_SIZE), dtype=np.float32)

    def prefill(self, chunks: Sequence[Sequence[int]], *, first_slot: int, past: int) -> FloatArray:
        assert len(chunks) == 1 or past == 0, "GroupQueryAttention refuses this"
        width = max(map(len, chunks))
        self.forwards.append(f"prefill {len(chunks)}x{width}")
        for row, chunk in enumerate(chunks):
            slot = first_slot + row
            self._touch(slot, past + width)
            self._cache[slot, past : past + width] = -1  # padding overwrites
            self._cache[slot, past : past + len(chunk)] = chunk
            self.prefilled[slot, past : past + width] = True
            self._buffer[row] = self._row(slot, past + len(chunk))
        return self._buffer[: len(chunks)]

    def decode(self, token_ids: TokenArray, past: TokenArray) -> FloatArray:
        self.forwards.append(f"decode {len(token_ids)}")
        for slot, (token_id, length) in enumerate(zip(token_ids, past, strict=True)):
            self._touch(slot, length + 1)
            self._cache[slot, length] = token_id
            self.prefilled[slot, length] = False
            self._buffer[slot] = self._row(slot, length + 1)
        return self._buffer[: len(token_ids)]

    def verify(self, token_ids: TokenArray, past: TokenArray) -> FloatArray:
        self.forwards.append(f"verify {len(token_ids)}")
        for slot, (ids, length) in enumerate(zip(token_ids, past, strict=True)):
            end = length + self.num_tokens
            assert end <= self.max_length, "it writes behind the slot"
            self._touch(slot, end)
            self._cache[slot, length:end] = ids
            self.prefilled[slot, length:end] = False
            for token in range(self.num_tokens):
                row = slot * self.num_tokens + token
                self._verified[row] = self._row(slot, length + token + 1)
        return self._verified[: token_ids.size]

    def move(self, *, source: int, target: int, length: int) -> None:
        self.moves.append((source, target))
        self._touch(target, length)
        self.prefilled[target, :length] = self.prefilled[source, :length]
        self._cache[target, :length] = self._cache[source, :length]

    def give_back(self, slot: int, *, length: int) -> None:
        pages = -(-length // self.page_tokens)
        self._taken[slot, pages:] = False
        self._cache[slot, pages * self.page_tokens :] = -1

    def _touch(self, slot: int, length: int) -> None:
        self._taken[slot, : -(-length // self.page_tokens)] = True
        assert self._taken.sum() * self.page_tokens <= self.max_cached_tokens, "the budget is passed"

    def _row(self, slot: int, length: int) -> FloatArray:
        history = self._cache[slot, :length].tolist()
        for token_id, effect in self.poison.items():
            if token_id in history and effect == "raise":
                raise RuntimeError("poisoned")
            if token_id in history:
                return np.full(VOCAB_SIZE, np.nan, dtype=np.float32)
        assert min(history) >= 0, "a gap in the cache"
        return logits_after(history)
