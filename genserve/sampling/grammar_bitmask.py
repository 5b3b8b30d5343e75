"""Grammar bitmask: the tokens that the grammars of some rows allow next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class StructuredOutputGrammar(Protocol):
    """The state of one answer within its grammar. Belongs to the engine's thread."""

    @property
    def complete(self) -> bool:
        """Whether the answer is complete, so that no token may follow."""

    @property
    def cut(self) -> bool:
        """Whether the answer was brought to its end for lack of room."""

    @property
    def failure(self) -> str:
        """Why no token may follow an incomplete answer; empty if some may."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Set bit `i % 32` of word `i // 32` for each token i that may follow, and clear the others."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False: it may not follow, and the state is invalid from now on."""


class ForkableGrammar(StructuredOutputGrammar, Protocol):
    """A grammar whose state can be copied."""

    def fork(self) -> ForkableGrammar | None:
        """Return an independent copy; None: it has no way to its end yet."""


def is_allowed(mask: NDArray[np.int32], token_id: int) -> bool:
    """Whether a mask of `StructuredOutputGrammar.fill` has the bit of a token."""
    return bool(int(mask[token_id // 32]) >> token_id % 32 & 1)


def allow(mask: NDArray[np.int32], token_id: int) -> None:
    """Set the bit of a token."""
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def allow_only(mask: NDArray[np.int32], token_ids: Iterable[int]) -> None:
    """Set the bits of these tokens, and clear all others."""
    mask[:] = 0
    for token_id in token_ids:
        allow(mask, token_id)


def forbid(mask: NDArray[np.int32], token_id: int) -> None:
    """Clear the bit of a token."""
    mask.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBitmask:
    """The tokens that G rows may get."""

    rows: tuple[int, ...]       # [G]
    bits: NDArray[np.int32]     # [G, ceil(V / 32)], as `StructuredOutputGrammar.fill` sets them

    @property
    def forced(self) -> frozenset[int]:
        """The rows that may get a single token."""
        counts = np.bitwise_count(self.bits.view(np.uint32)).sum(axis=1)
        return frozenset(row for row, count in zip(self.rows, counts.tolist(), strict=True) if count == 1)

    def forbidden(self, num_tokens: int) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Yield each row, and whether each of its tokens is forbidden: [num_tokens]."""
        for row, bits in zip(self.rows, ~self.bits, strict=True):
            unpacked = np.unpackbits(bits.view(np.uint8), count=num_tokens, bitorder="little")
            yield row, unpacked.view(np.bool_)


def grammar_bitmask(
    grammars: Sequence[StructuredOutputGrammar | None], *, num_tokens: int
) -> GrammarBitmask | None:
    """Return the bitmask of the rows that have a grammar; None if no row has one."""
    rows = tuple(row for row, grammar in enumerate(grammars) if grammar is not None)
    if not rows:
        return None
    bits = np.empty((len(rows), -(-num_tokens // 32)), dtype=np.int32)
    for mask, row in zip(bits, rows, strict=True):
        if (grammar := grammars[row]) is not None:
            grammar.fill(mask)
    return GrammarBitmask(rows=rows, bits=bits)
