"""Reasoning grammar: lets an answer reason freely before it follows another grammar."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from genserve.sampling.grammar_bitmask import allow, forbid
from genserve.text.closing_grammar import ForkableGrammar


class _State(Enum):
    BEFORE = auto()     # reasoning may begin
    INSIDE = auto()
    AFTER = auto()


class ReasoningGrammar:
    """Lets an answer reason freely before it follows a grammar; implements `StructuredOutputGrammar`.

    Reasoning may have any tokens except those that end an answer. It costs nothing but the mask.

    Args:
        grammar: of what follows.
        start_id: the token that begins reasoning.
        end_id: the token that ends it.
        ending_ids: the tokens that end an answer.
        begun: the prompt ends within reasoning.
    """

    def __init__(
        self,
        grammar: ForkableGrammar,
        *,
        start_id: int,
        end_id: int,
        ending_ids: Collection[int],
        begun: bool,
    ) -> None:
        self._grammar = grammar
        self._start_id = start_id
        self._end_id = end_id
        self._ending_ids = frozenset(ending_ids)
        self._state = _State.INSIDE if begun else _State.BEFORE

    cut = False

    def fork(self) -> ForkableGrammar | None:
        """See `ForkableGrammar`."""
        return None if self._state is _State.INSIDE else self._grammar.fork()

    @property
    def complete(self) -> bool:
        """See `StructuredOutputGrammar`."""
        return self._state is not _State.INSIDE and self._grammar.complete

    @property
    def failure(self) -> str:
        """See `StructuredOutputGrammar`."""
        return "" if self._state is _State.INSIDE else self._grammar.failure

    def fill(self, mask: NDArray[np.int32]) -> None:
        """See `StructuredOutputGrammar`."""
        if self._state is _State.INSIDE:
            mask[:] = -1
            for token_id in self._ending_ids:
                if token_id < 32 * len(mask):
                    forbid(mask, token_id)
            return
        self._grammar.fill(mask)
        if self._state is _State.BEFORE:
            allow(mask, self._start_id)

    def accept(self, token_id: int) -> bool:
        """See `StructuredOutputGrammar`."""
        match self._state:
            case _State.BEFORE if token_id == self._start_id:
                self._state = _State.INSIDE
            case _State.INSIDE:
                self._state = _State.AFTER if token_id == self._end_id else _State.INSIDE
                return token_id not in self._ending_ids
            case _:
                self._state = _State.AFTER
                return self._grammar.accept(token_id)
        return True
