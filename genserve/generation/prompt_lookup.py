"""Prompt lookup: drafts from what follows the same last tokens earlier, in the prompt or in the answer."""

from __future__ import annotations

from collections.abc import Sequence

from genserve.generation.token_sequence import TokenSequence

__all__ = ["PromptLookup"]

_SIZES = (4, 3, 2)      # of the last tokens that are looked for, in this order


class PromptLookup:
    """Proposes what came after the latest occurrence of the last tokens; a `Draft`. Costs some microseconds.

    Belongs to the engine's thread.

    Source: Saxena, "Prompt Lookup Decoding" (2023), https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self) -> None:
        self._indices: dict[TokenSequence, _Index] = {}

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """See `Draft.propose`."""
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = _Index()
        return index.following(sequence.token_ids, count)

    def drop(self, sequence: TokenSequence) -> None:
        """See `Draft.drop`."""
        self._indices.pop(sequence, None)


class _Index:
    """Where each run of some tokens ended last in one growing list; reads each of its tokens once."""

    def __init__(self) -> None:
        self._followed_at: dict[tuple[int, ...], int] = {}      # by run, the place of what follows it
        self._num_read = 0

    def following(self, token_ids: Sequence[int], count: int) -> Sequence[int]:
        """Return `count` tokens that may follow, or none."""
        self._read(token_ids)
        for size in _SIZES:
            start = self._followed_at.get(tuple(token_ids[-size:]))
            if start is not None:
                # Where it ends before so many: what has come twice in a row may come again.
                period = len(token_ids) - start
                return [token_ids[start + i % period] for i in range(count)]
        return ()

    def _read(self, token_ids: Sequence[int]) -> None:
        """Note all runs but those that nothing follows yet."""
        for end in range(self._num_read + 1, len(token_ids)):
            for size in _SIZES:
                if size <= end:
                    self._followed_at[tuple(token_ids[end - size : end])] = end
        self._num_read = max(self._num_read, len(token_ids) - 1)
