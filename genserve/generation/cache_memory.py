"""Cache memory: how much of the KV cache's budget each slot holds."""

from __future__ import annotations

from collections.abc import Mapping

from genserve.generation.logits_model import LogitsModel

__all__ = ["CacheMemory"]


class CacheMemory:
    """The memory of the slots, counted in tokens, whole pages of them. Belongs to the engine's thread.

    A slot takes memory when something is written into it and holds it, whoever sits there, until it is
    given back: what lies behind a new occupant's tokens is given back only when the budget is short.
    """

    def __init__(self, model: LogitsModel) -> None:
        self._model = model
        self._held = [0] * model.num_slots

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._model.page_tokens

    @property
    def budget(self) -> int:
        """How many tokens may be held."""
        return self._model.max_cached_tokens

    @property
    def held(self) -> int:
        """How many tokens are held."""
        return sum(self._held)

    def rounded(self, length: int) -> int:
        """Return how much a slot holds for so many tokens."""
        return -(-length // self.page_tokens) * self.page_tokens

    def headed_for(self, length: int) -> int:
        """Return what a sequence of so many tokens holds soon: a page more, unless its slot ends there."""
        return self.rounded(min(length + self.page_tokens, self._model.max_length))

    def longest(self, num_sequences: int) -> int:
        """Return how many tokens each of so many sequences may have, so that they can always run together."""
        pages = self.budget // num_sequences // self.page_tokens
        if pages * self.page_tokens >= self.rounded(self._model.max_length):
            return self._model.max_length
        return (pages - 1) * self.page_tokens   # a page more is what `headed_for` counts

    def missing(self, lengths: Mapping[int, int]) -> int:
        """Return by how much the budget would be passed if these slots held so much; 0 or less: not."""
        held = self._held
        more = sum(self.rounded(n) - held[slot] for slot, n in lengths.items() if n > held[slot])
        return self.held + more - self.budget

    def hold(self, lengths: Mapping[int, int]) -> None:
        """Note that so many positions of these slots are written."""
        for slot, length in lengths.items():
            if length > self._held[slot]:
                self._held[slot] = self.rounded(length)

    def give_back(self, slot: int, *, length: int) -> None:
        """Give back what a slot holds behind its first `length` positions."""
        if self.rounded(length) < self._held[slot]:
            self._model.give_back(slot, length=length)
            self._held[slot] = self.rounded(length)
