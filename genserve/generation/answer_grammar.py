"""Answer grammar: which tokens may come next in one answer, and the masks that say so to a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["AnswerGrammar", "TokenMasks", "token_masks"]


class AnswerGrammar(Protocol):
    """Where one answer stands in the form that it must have. Belongs to the engine's thread."""

    @property
    def complete(self) -> bool:
        """Whether the form is there, and nothing may follow."""

    @property
    def failure(self) -> str:
        """Why it lets no token follow any more, though it is not complete; empty while it does."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Set bit `i % 32` of word `i // 32` where token i may come next, and clear the others."""

    def accept(self, token_id: int) -> bool:
        """Go on behind one more token; False where it may not come, and then the state is void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """Which tokens G rows may get."""

    rows: tuple[int, ...]       # [G]
    bits: NDArray[np.int32]     # [G, ceil(V / 32)], as `AnswerGrammar.fill` sets them

    @property
    def forced(self) -> frozenset[int]:
        """The rows that may get one token alone."""
        counts = np.bitwise_count(self.bits.view(np.uint32)).sum(axis=1)
        return frozenset(row for row, count in zip(self.rows, counts.tolist(), strict=True) if count == 1)

    def forbidden(self, num_tokens: int) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Yield each row, and which of its tokens it may not get: [num_tokens]."""
        for row, bits in zip(self.rows, ~self.bits, strict=True):
            unpacked = np.unpackbits(bits.view(np.uint8), count=num_tokens, bitorder="little")
            yield row, unpacked.view(np.bool_)


def token_masks(grammars: Sequence[AnswerGrammar | None], *, num_tokens: int) -> TokenMasks | None:
    """Return the masks of the rows that have a grammar; None if no row has."""
    rows = tuple(row for row, grammar in enumerate(grammars) if grammar is not None)
    if not rows:
        return None
    bits = np.empty((len(rows), -(-num_tokens // 32)), dtype=np.int32)
    for mask, row in zip(bits, rows, strict=True):
        if (grammar := grammars[row]) is not None:
            grammar.fill(mask)
    return TokenMasks(rows=rows, bits=bits)
