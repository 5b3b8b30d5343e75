"""Logits edits: the entries of some rows of logits that requests change before tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genserve.sampling.grammar_bitmask import GrammarBitmask
from genserve.sampling.logits_array import FloatArray, LogitsArray, TokenArray

# Copies an index or numbers to the device of the logits.
ToDevice: TypeAlias = Callable[[NDArray[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """E entries of rows of logits, and a number for each."""

    rows: TokenArray            # [E]
    token_ids: TokenArray       # [E]
    values: FloatArray          # [E]

    @staticmethod
    def of(token_ids: Iterable[int] | TokenArray, values: float | FloatArray = 0.0, *, row: int) -> Entries:
        """Return entries of one row."""
        ids = token_ids if isinstance(token_ids, np.ndarray) else np.fromiter(token_ids, dtype=np.int64)
        if not ids.size:
            return _NO_ENTRIES
        filled = np.full(ids.shape, values, dtype=np.float32)
        return Entries(rows=np.full(ids.shape, row, dtype=np.int64), token_ids=ids, values=filled)


_NO_IDS: TokenArray = np.empty(0, dtype=np.int64)
_NO_ENTRIES = Entries(rows=_NO_IDS, token_ids=_NO_IDS, values=np.empty(0, dtype=np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEdit:
    """The edit of one row of logits by a plug-in."""

    row: int
    apply: Callable[[LogitsArray], None]        # overwrites [V] float32, of numpy or of torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsEdits:
    """The edits of some rows, in the order in which they are applied. Only `banned` may repeat an entry."""

    before: tuple[RowEdit, ...] = ()
    bitmask: GrammarBitmask | None = None   # forbidden tokens get -inf
    allowed: Entries = _NO_ENTRIES      # of a row with any, all other tokens get -inf; values unused
    biased: Entries = _NO_ENTRIES       # added
    repeated: Entries = _NO_ENTRIES     # a logit above 0 is divided by it, any other multiplied
    lowered: Entries = _NO_ENTRIES      # subtracted
    banned: Entries = _NO_ENTRIES       # gets -inf; values unused
    after: tuple[RowEdit, ...] = ()


NO_EDITS = LogitsEdits()


def join_edits(edits: Sequence[LogitsEdits], *, bitmask: GrammarBitmask | None = None) -> LogitsEdits:
    """Return the edits of several rows as one; `bitmask` is that of all rows."""
    steps = [step.name for step in fields(LogitsEdits) if step.name != "bitmask"]
    joined = {name: _joined([getattr(e, name) for e in edits or [NO_EDITS]]) for name in steps}
    return LogitsEdits(bitmask=bitmask, **joined)


def apply_edits(logits: LogitsArray, edits: LogitsEdits, *, to_device: ToDevice = np.asarray) -> None:
    """Apply edits to logits [R, V] float32, of numpy or of torch; all other rows stay as they are.

    `to_device` copies a numpy array to the device of the logits.

    Source: the repetition penalty is that of Keskar et al., "CTRL" (2019), as transformers applies it.
    """
    for edit in edits.before:
        edit.apply(logits[edit.row])
    if edits.bitmask is not None:
        for row, forbidden in edits.bitmask.forbidden(logits.shape[1]):
            logits[row][to_device(forbidden)] = -np.inf
    if edits.allowed.rows.size:
        allowed = _index(edits.allowed, to_device)
        kept = logits[allowed]
        logits[to_device(np.unique(edits.allowed.rows))] = -np.inf
        logits[allowed] = kept
    if edits.biased.rows.size:
        logits[_index(edits.biased, to_device)] += to_device(edits.biased.values)
    if edits.repeated.rows.size:
        repeated, penalty = _index(edits.repeated, to_device), to_device(edits.repeated.values)
        found = logits[repeated]
        logits[repeated] = found.clip(min=0) / penalty + found.clip(max=0) * penalty
    if edits.lowered.rows.size:
        logits[_index(edits.lowered, to_device)] -= to_device(edits.lowered.values)
    if edits.banned.rows.size:
        logits[_index(edits.banned, to_device)] = -np.inf
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


def _index(entries: Entries, to_device: ToDevice) -> tuple[Any, Any]:
    return to_device(entries.rows), to_device(entries.token_ids)
