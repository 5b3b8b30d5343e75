"""Logits edits: the entries of some rows of logits that requests change before tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genserve.generation.logits_model import FloatArray, LogitsArray, TokenArray

__all__ = [
    "Entries",
    "GrammarBitmask",
    "LogitsEdits",
    "RowEdit",
    "StructuredOutputGrammar",
    "apply_edits",
    "grammar_bitmask",
    "join_edits",
]


class StructuredOutputGrammar(Protocol):
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
class GrammarBitmask:
    """Which tokens G rows may get."""

    rows: tuple[int, ...]       # [G]
    bits: NDArray[np.int32]     # [G, ceil(V / 32)], as `StructuredOutputGrammar.fill` sets them

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


def grammar_bitmask(grammars: Sequence[StructuredOutputGrammar | None], *, num_tokens: int) -> GrammarBitmask | None:
    """Return the masks of the rows that have a grammar; None if no row has."""
    rows = tuple(row for row, grammar in enumerate(grammars) if grammar is not None)
    if not rows:
        return None
    bits = np.empty((len(rows), -(-num_tokens // 32)), dtype=np.int32)
    for mask, row in zip(bits, rows, strict=True):
        if (grammar := grammars[row]) is not None:
            grammar.fill(mask)
    return GrammarBitmask(rows=rows, bits=bits)


# Brings an index or numbers to where the logits lie.
Place: TypeAlias = Callable[[NDArray[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """E places in rows of logits, and a number for each."""

    rows: TokenArray            # [E]
    token_ids: TokenArray       # [E]
    values: FloatArray          # [E]

    @staticmethod
    def of(token_ids: Iterable[int] | TokenArray, values: float | FloatArray = 0.0, *, row: int) -> Entries:
        """Return places of one row."""
        ids = token_ids if isinstance(token_ids, np.ndarray) else np.fromiter(token_ids, dtype=np.int64)
        if not ids.size:
            return _NONE
        filled = np.full(ids.shape, values, dtype=np.float32)
        return Entries(rows=np.full(ids.shape, row, dtype=np.int64), token_ids=ids, values=filled)


_NO_IDS: TokenArray = np.empty(0, dtype=np.int64)
_NONE = Entries(rows=_NO_IDS, token_ids=_NO_IDS, values=np.empty(0, dtype=np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEdit:
    """What code of the repository does to one row of logits."""

    row: int
    apply: Callable[[LogitsArray], None]        # overwrites [V] float32, of numpy or of torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsEdits:
    """What is changed, in the order in which it is; no place comes twice in one field but `banned`."""

    before: tuple[RowEdit, ...] = ()
    masks: GrammarBitmask | None = None     # what they do not allow gets -inf
    allowed: Entries            # of a row with any, all other tokens get -inf; values unused
    biased: Entries             # added
    repeated: Entries           # what is above 0 is divided by it, the rest multiplied
    lowered: Entries            # subtracted
    banned: Entries             # gets -inf; values unused
    after: tuple[RowEdit, ...] = ()


def join_edits(edits: Sequence[LogitsEdits], *, masks: GrammarBitmask | None = None) -> LogitsEdits:
    """Return the edits of several rows as one; `masks` are those of all rows."""
    stages = [stage.name for stage in fields(LogitsEdits) if stage.name != "masks"]
    joined = {name: _joined([getattr(e, name) for e in edits or [_NO_EDITS]]) for name in stages}
    return LogitsEdits(masks=masks, **joined)


def apply_edits(logits: LogitsArray, edits: LogitsEdits, *, place: Place = np.asarray) -> None:
    """Change the logits as the edits say; those of other rows stay as they are.

    Args:
        logits: [R, V] float32, of numpy or of torch; overwritten.
        edits: of its rows.
        place: brings a numpy array to where the logits lie.

    Source: the penalty is that of Keskar et al., "CTRL" (2019), as transformers applies it.
    """
    for edit in edits.before:
        edit.apply(logits[edit.row])
    if edits.masks is not None:
        for row, forbidden in edits.masks.forbidden(logits.shape[1]):
            logits[row][place(forbidden)] = -np.inf
    if edits.allowed.rows.size:
        allowed = _index(edits.allowed, place)
        kept = logits[allowed]
        logits[place(np.unique(edits.allowed.rows))] = -np.inf
        logits[allowed] = kept
    if edits.biased.rows.size:
        logits[_index(edits.biased, place)] += place(edits.biased.values)
    if edits.repeated.rows.size:
        repeated, penalty = _index(edits.repeated, place), place(edits.repeated.values)
        found = logits[repeated]
        logits[repeated] = found.clip(min=0) / penalty + found.clip(max=0) * penalty
    if edits.lowered.rows.size:
        logits[_index(edits.lowered, place)] -= place(edits.lowered.values)
    if edits.banned.rows.size:
        logits[_index(edits.banned, place)] = -np.inf
    for edit in edits.after:
        edit.apply(logits[edit.row])


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(chain.from_iterable(parts))
    return Entries(
        rows=np.concatenate([part.rows for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        values=np.concatenate([part.values for part in parts]),
    )


def _index(entries: Entries, place: Place) -> tuple[Any, Any]:
    return place(entries.rows), place(entries.token_ids)


_NOWHERE = Entries.of((), row=0)
_NO_EDITS = LogitsEdits(
    allowed=_NOWHERE, biased=_NOWHERE, repeated=_NOWHERE, lowered=_NOWHERE, banned=_NOWHERE
)
