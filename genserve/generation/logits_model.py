"""Logits model: all that the engine asks of a model, a forward over slots of a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["FloatArray", "LogitsArray", "LogitsModel", "TokenArray", "on_host"]

FloatArray = NDArray[np.float32]
TokenArray = NDArray[np.int64]
# float32: a numpy array, or of a model on another device a torch tensor that lies there. Both are indexed
# alike and have `__dlpack__`.
LogitsArray: TypeAlias = Any


class LogitsModel(Protocol):
    """A model with a KV cache of `num_slots` slots, each with room for `max_length` tokens.

    Both forwards write the keys and values of the tokens they are given into the cache, at the
    positions after `past`, and answer with a view of a buffer that the next forward overwrites.
    One thread calls all of it.
    """

    @property
    def num_slots(self) -> int:
        """How many token sequences can share a step."""

    @property
    def max_length(self) -> int:
        """How many tokens one slot holds, prompt and answer together."""

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""

    @property
    def page_tokens(self) -> int:
        """A slot's memory is taken and given back for so many tokens at a time."""

    @property
    def max_cached_tokens(self) -> int:
        """How many tokens all slots together may hold, in whole pages; at least one full slot."""

    def prefill(self, chunks: Sequence[Sequence[int]], *, first_slot: int, past: int) -> LogitsArray:
        """Run `chunks[i]` in slot `first_slot + i`; more than one chunk needs `past == 0`.

        Returns:
            [len(chunks), vocab_size] float32: the logits after the last token of each chunk.
        """

    def decode(self, token_ids: TokenArray, past: TokenArray) -> LogitsArray:
        """Run one token in each of the slots 0 to B-1.

        Args:
            token_ids: [B] int64.
            past: [B] int64, how many positions each slot holds already.

        Returns:
            [B, vocab_size] float32.
        """

    def move(self, *, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` over those of slot `target`."""

    def give_back(self, slot: int, *, length: int) -> None:
        """Give back the memory of slot `slot` behind its first `length` positions; nobody needs them."""


def on_host(logits: LogitsArray) -> FloatArray:
    """Return logits in the memory of the host; themselves, if they are there."""
    return np.asarray(logits.cpu() if hasattr(logits, "cpu") else logits)
