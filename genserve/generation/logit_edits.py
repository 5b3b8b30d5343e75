"""Logit edits: the few logits of some rows that requests want changed, before tokens are picked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genserve.generation.answer_grammar import TokenMasks
from genserve.generation.logits_model import FloatArray, LogitsArray, TokenArray

__all__ = ["Entries", "LogitEdits", "RowEdit", "apply_edits", "join_edits"]

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
class LogitEdits:
    """What is changed, in the order in which it is; no place comes twice in one field but `banned`."""

    before: tuple[RowEdit, ...] = ()
    masks: TokenMasks | None = None     # what they do not allow gets -inf
    allowed: Entries            # of a row with any, all other tokens get -inf; values unused
    biased: Entries             # added
    repeated: Entries           # what is above 0 is divided by it, the rest multiplied
    lowered: Entries            # subtracted
    banned: Entries             # gets -inf; values unused
    after: tuple[RowEdit, ...] = ()


def join_edits(edits: Sequence[LogitEdits], *, masks: TokenMasks | None = None) -> LogitEdits:
    """Return the edits of several rows as one; `masks` are those of all rows."""
    stages = [stage.name for stage in fields(LogitEdits) if stage.name != "masks"]
    joined = {name: _joined([getattr(e, name) for e in edits or [_NO_EDITS]]) for name in stages}
    return LogitEdits(masks=masks, **joined)


def apply_edits(logits: LogitsArray, edits: LogitEdits, *, place: Place = np.asarray) -> None:
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
_NO_EDITS = LogitEdits(
    allowed=_NOWHERE, biased=_NOWHERE, repeated=_NOWHERE, lowered=_NOWHERE, banned=_NOWHERE
)
