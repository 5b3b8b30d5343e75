"""Logits processors: penalties, biases and bans of a request as edits of its row of logits, and their effect.

Temperature, top-k, top-p and min-p are the draw: sampler.py.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genserve.sampling.grammar_bitmask import GrammarBitmask
from genserve.sampling.logits_array import FloatArray, LogitsArray, TokenArray
from genserve.sampling.sampling_params import EDIT_PARAMETERS, PARAMETERS, SamplingParams

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
    allowed: Entries = _NO_ENTRIES      # where a row has any, all other tokens get -inf; values unused
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

    Source: the repetition penalty follows Keskar et al., "CTRL" (2019), as transformers applies it.
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


# A longer repetition counts as one of this many tokens: it costs more than any logit is worth.
MAX_LENGTH = 256
MAX_PENALTY = 1e9   # rules a token out, and sums with it stay exact


class DryBreakers:
    """The sequence breakers of DRY as token ids. All answers to a request share them."""

    def __init__(self, spellings: Iterable[Sequence[int]]) -> None:
        self._by_last_id: defaultdict[int, list[list[int]]] = defaultdict(list)
        for token_ids in spellings:
            self._by_last_id[token_ids[-1]].append(list(token_ids))

    def ends_at(self, token_ids: Sequence[int], end: int) -> bool:
        """Return whether one of them ends before index `end`."""
        breakers = self._by_last_id.get(token_ids[end - 1], ())
        return any(token_ids[max(0, end - len(breaker)) : end] == breaker for breaker in breakers)

    def __contains__(self, token_id: int) -> bool:
        """Return whether a token is one of them by itself."""
        return [token_id] in self._by_last_id.get(token_id, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedParams:
    """The texts of a request's parameters as token ids of the vocabulary. Its answers share it."""

    bad_words: Sequence[Sequence[int]] = ()         # every spelling of each
    dry_breakers: DryBreakers = DryBreakers(())     # noqa: RUF009  # is not modified
    spared_ids: Sequence[int] = ()                  # the tokens that XTC never removes


class DryPenalty:
    """Don't repeat yourself (DRY), for one sequence. Reads each token once.

    If the last n tokens occurred before, the token that followed them there is penalized by
    multiplier * base ** (n - allowed_length), for the longest such n. No repetition extends over a breaker.

    Source: p-e-w, https://github.com/oobabooga/text-generation-webui/pull/5677, with the details of
    llama.cpp's sampler, except for MAX_LENGTH.
    """

    def __init__(self, params: SamplingParams, *, breakers: DryBreakers) -> None:
        """Start before the first token."""
        self._multiplier = params.dry_multiplier
        self._base = params.dry_base
        self._allowed_length = params.dry_allowed_length
        self._window = params.dry_penalty_last_n
        self._breakers = breakers
        self._token_ids = array("q")
        self._last_break = 0        # tokens before this index cannot be repeated

    def penalties(self, token_ids: Sequence[int]) -> tuple[TokenArray, FloatArray]:
        """Return the tokens that would continue a repetition, and the penalty of each: [E] and [E].

        Args:
            token_ids: the tokens of prompt and answer, which begin with the tokens of the last call.
        """
        self._read(token_ids)
        first = 0 if self._window < 0 else max(0, len(self._token_ids) - self._window)
        lengths = self._longest(np.array(self._token_ids[first:], dtype=np.int64))
        repeated = np.fromiter(lengths, dtype=np.int64, count=len(lengths))
        exponents = np.fromiter(lengths.values(), dtype=np.float64, count=len(lengths)) - self._allowed_length
        with np.errstate(over="ignore"):
            penalties = self._multiplier * self._base**exponents
        return repeated, np.minimum(penalties, MAX_PENALTY).astype(np.float32)

    def _read(self, token_ids: Sequence[int]) -> None:
        num_read = len(self._token_ids)
        self._token_ids.extend(token_ids[num_read:])
        for end in range(len(token_ids), num_read, -1):
            if self._breakers.ends_at(token_ids, end):
                self._last_break = end
                return

    def _longest(self, ids: NDArray[np.int64]) -> dict[int, int]:
        """Return the length of the longest repetition, by the token that continued it."""
        limit = min(len(self._token_ids) - self._last_break, len(ids), MAX_LENGTH)
        lengths: dict[int, int] = {}
        if limit < self._allowed_length:
            return lengths
        last = len(ids) - 1
        ends = np.arange(last)      # where the last `length` tokens occurred before
        for length in range(1, limit + 1):
            ends = ends[ends >= length - 1]
            ends = ends[ids[ends - length + 1] == ids[last - length + 1]]
            if not ends.size:
                break
            if length >= self._allowed_length:
                lengths.update(dict.fromkeys(ids[ends + 1].tolist(), length))
        return {token_id: length for token_id, length in lengths.items() if token_id not in self._breakers}


class BuiltinLogitsProcessors:
    """The edits of one sequence's logits by its parameters. Reads each of its tokens once.

    Belongs to the engine's thread.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenized: TokenizedParams,
        *,
        num_prompt_tokens: int,
        ending_ids: frozenset[int],
    ) -> None:
        """Start before the first token; tokens of `ending_ids` end the answer."""
        self._num_prompt_tokens = num_prompt_tokens
        self._min_length = num_prompt_tokens + params.min_tokens
        self._ending_ids = tuple(ending_ids)
        self._suppressed = params.suppress_tokens
        self._bad_words = [tuple(word) for word in tokenized.bad_words]
        self._allowed = np.array(params.allowed_token_ids, dtype=np.int64)
        self._biased = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._ngram_size = params.no_repeat_ngram_size
        self._window = params.penalty_window
        uses_dry = params.dry_multiplier and params.dry_penalty_last_n
        self._dry = DryPenalty(params, breakers=tokenized.dry_breakers) if uses_dry else None
        self._num_read = 0
        self._num_forgotten = 0
        self._seen: Counter[int] = Counter()        # counts in prompt and answer
        self._seen_ids: TokenArray = np.empty(0, dtype=np.int64)
        self._generated: Counter[int] = Counter()   # counts in the answer
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)

    @staticmethod
    def used_by(params: SamplingParams) -> bool:
        """Return whether a request edits logits."""
        return any(getattr(params, name) != PARAMETERS[name].neutral for name in EDIT_PARAMETERS)

    def edits(self, token_ids: Sequence[int], *, row: int) -> LogitsEdits:
        """Return the edits of row `row`, the logits after these tokens."""
        self._read(token_ids)
        lowered, amounts = self._lowered(token_ids)
        return LogitsEdits(
            allowed=Entries.of(self._allowed, row=row),
            biased=Entries.of(self._biased, self._bias, row=row),
            repeated=Entries.of(self._repeated(), self._repetition, row=row),
            lowered=Entries.of(lowered, amounts, row=row),
            banned=Entries.of(self._banned(token_ids), row=row),
        )

    def _read(self, token_ids: Sequence[int]) -> None:
        read, length = self._num_read, len(token_ids)
        self._count(token_ids, read, length, Counter.update)
        if self._window and length - self._window > self._num_forgotten:
            self._count(token_ids, self._num_forgotten, length - self._window, _forget)
            self._num_forgotten = length - self._window
        for position in range(read, length) if self._ngram_size else ():
            first = position + 1 - self._ngram_size
            if first >= 0:
                self._followers[tuple(token_ids[first:position])].add(token_ids[position])
        self._num_read = length

    def _count(
        self,
        token_ids: Sequence[int],
        first: int,
        last: int,
        change: Callable[[Counter[int], Sequence[int]], None],
    ) -> None:
        if self._repetition != 1:
            change(self._seen, token_ids[first:last])
        if self._frequency or self._presence:
            change(self._generated, token_ids[max(first, self._num_prompt_tokens) : last])

    def _repeated(self) -> TokenArray:
        # A new token is seldom a new id after a long prompt. A window may lose one id as it gains another.
        if self._window or len(self._seen) != self._seen_ids.size:
            self._seen_ids = np.fromiter(self._seen, dtype=np.int64)
        return self._seen_ids

    def _lowered(self, token_ids: Sequence[int]) -> tuple[TokenArray, FloatArray]:
        """Return the tokens whose logits are lowered, and the amounts: [E] and [E]."""
        generated = np.fromiter(self._generated, dtype=np.int64)
        counts = np.fromiter(self._generated.values(), dtype=np.float32)
        amounts = self._frequency * counts + self._presence
        if self._dry is None:
            return generated, amounts
        repeated, penalties = self._dry.penalties(token_ids)
        both, index = np.unique(np.concatenate([generated, repeated]), return_inverse=True)
        summed = np.bincount(index, weights=np.concatenate([amounts, penalties]), minlength=both.size)
        return both, summed.astype(np.float32)

    def _banned(self, token_ids: Sequence[int]) -> Iterator[int]:
        length = len(token_ids)
        yield from self._suppressed
        if length < self._min_length:
            yield from self._ending_ids
        if self._ngram_size and length + 1 >= self._ngram_size:
            yield from self._followers.get(tuple(token_ids[length + 1 - self._ngram_size :]), ())
        for *begun, last in self._bad_words:
            if list(token_ids[max(0, length - len(begun)) :]) == begun:
                yield last


def _forget(counts: Counter[int], token_ids: Sequence[int]) -> None:
    counts.subtract(token_ids)
    for token_id in set(token_ids):
        if not counts[token_id]:
            del counts[token_id]
