"""Repetition: which tokens would go on with something that is there already, and what that costs them."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from genserve.generation.logits_model import FloatArray, TokenArray
from genserve.sampling.params import SamplingParams

__all__ = ["NO_BREAKERS", "Breakers", "Repetition"]

# A repetition that is longer counts as so long: it costs more than any logit is worth.
MAX_LENGTH = 256
MAX_PENALTY = 1e9   # nothing is left of a token, and sums of what is weighted stay exact


class Breakers:
    """The texts that no repetition reaches over, as token ids. All answers to a request share them."""

    def __init__(self, spellings: Iterable[Sequence[int]]) -> None:
        self._by_last_id: defaultdict[int, list[list[int]]] = defaultdict(list)
        for token_ids in spellings:
            self._by_last_id[token_ids[-1]].append(list(token_ids))

    def stands_before(self, token_ids: Sequence[int], end: int) -> bool:
        """Whether one of them ends before the place `end`."""
        known = self._by_last_id.get(token_ids[end - 1], ())
        return any(token_ids[max(0, end - len(breaker)) : end] == breaker for breaker in known)

    def __contains__(self, token_id: int) -> bool:
        """Whether a token is one of them by itself."""
        return [token_id] in self._by_last_id.get(token_id, ())


NO_BREAKERS = Breakers(())


class Repetition:
    """Don't repeat yourself (DRY), for one token sequence. Reads each token once.

    If the last n tokens stand somewhere before, the token that followed them there loses
    multiplier * base ** (n - allowed_length), for the longest such n. No repetition reaches over a breaker.

    Source: p-e-w, https://github.com/oobabooga/text-generation-webui/pull/5677, with the details of
    llama.cpp's sampler, but for MAX_LENGTH.
    """

    def __init__(self, params: SamplingParams, *, breakers: Breakers) -> None:
        """Begin before the first token."""
        self._multiplier = params.dry_multiplier
        self._base = params.dry_base
        self._allowed_length = params.dry_allowed_length
        self._window = params.dry_penalty_last_n
        self._breakers = breakers
        self._token_ids = array("q")
        self._last_break = 0        # what lies before is not repeated

    def penalties(self, token_ids: Sequence[int]) -> tuple[TokenArray, FloatArray]:
        """Return the tokens that would go on with a repetition, and what comes off the logit of each.

        Args:
            token_ids: all there are; those of the last call are the first of them.
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
        known = len(self._token_ids)
        self._token_ids.extend(token_ids[known:])
        for end in range(len(token_ids), known, -1):
            if self._breakers.stands_before(token_ids, end):
                self._last_break = end
                return

    def _longest(self, ids: NDArray[np.int64]) -> dict[int, int]:
        """Return, by the token that went on with it, how long the longest repetition is."""
        limit = min(len(self._token_ids) - self._last_break, len(ids), MAX_LENGTH)
        lengths: dict[int, int] = {}
        if limit < self._allowed_length:
            return lengths
        last = len(ids) - 1
        ends = np.arange(last)      # where the last `length` tokens stand, too
        for length in range(1, limit + 1):
            ends = ends[ends >= length - 1]
            ends = ends[ids[ends - length + 1] == ids[last - length + 1]]
            if not ends.size:
                break
            if length >= self._allowed_length:
                lengths.update(dict.fromkeys(ids[ends + 1].tolist(), length))
        return {token_id: length for token_id, length in lengths.items() if token_id not in self._breakers}
