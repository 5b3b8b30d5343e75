"""Harmony grammar: the grammar of gpt-oss' answers, see `genserve.text.harmony`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from genserve.sampling.grammar_bitmask import ForkableGrammar, is_allowed
from genserve.structured_output.argument_grammar import ANYTHING, ArgumentGrammar, Parts, written
from genserve.structured_output.tool_grammar import ToolGrammar
from genserve.text.harmony import CHANNEL, CONSTRAIN, END, MARKS, MESSAGE, START, THOUGHTS, HarmonyTokens


class HarmonyGrammar(ToolGrammar):
    """The structure of an answer of messages: thoughts and texts before a call, then a call or the answer.

    The answer may end within a thought, unless a call or a form must follow.
    """

    __slots__ = ()

    def _rules(
        self, parts_of: Callable[[str], Parts], arguments: ArgumentGrammar, *, has_structure: bool
    ) -> Iterator[str]:
        start, channel, constrain, message, end = (
            written(parts_of(mark)) for mark in (START, CHANNEL, CONSTRAIN, MESSAGE, END)
        )
        yield f"WITH_MARK: {ANYTHING} ({' | '.join(json.dumps(mark) for mark in MARKS)}) {ANYTHING}"
        yield f"TEXT: {ANYTHING} & ~WITH_MARK"
        yield f'thought: {channel} "{THOUGHTS}" {message} TEXT'
        yield f'preamble: {channel} "commentary" {message} TEXT'
        last = []
        if not self.must_call:
            last.append(f'{channel} "final" {message} {"@text" if has_structure else "TEXT"}')
            last += [] if has_structure else ["thought"]
        for index, tool in self.tools.items():
            # The first head is how the template writes it, the second how the models mostly do.
            recipient = f"to=functions.{tool.name}"
            heads = (
                f'{json.dumps(f" {recipient}")} {channel} "commentary json"',
                f'{channel} {json.dumps(f"commentary {recipient} ")} {constrain} "json"',
            )
            last.append(f"({' | '.join(heads)}) {message} {arguments.of(index, tool)}")
        yield f'start: ((thought | preamble) {end} {start} "assistant")* ({" | ".join(last)})'


class HarmonyAnswer:
    """Follows the grammar of an answer; implements `ForkableGrammar`.

    Before the last message there is no way to the end: a thought, whose text is free, may come at any time.
    """

    cut = False

    def __init__(self, grammar: ForkableGrammar, tokens: HarmonyTokens, *, vocab_size: int) -> None:
        """Begin an answer."""
        self._grammar = grammar
        self._tokens = tokens
        self._num_words = -(-vocab_size // 32)
        self._is_last = False       # the text of the last message has begun

    def fork(self) -> ForkableGrammar | None:
        """See `ForkableGrammar`."""
        return self._grammar.fork() if self._is_last else None

    @property
    def complete(self) -> bool:
        """See `StructuredOutputGrammar`."""
        return self._grammar.complete

    @property
    def failure(self) -> str:
        """See `StructuredOutputGrammar`."""
        return self._grammar.failure

    def fill(self, mask: NDArray[np.int32]) -> None:
        """See `StructuredOutputGrammar`."""
        self._grammar.fill(mask)

    def accept(self, token_id: int) -> bool:
        """See `StructuredOutputGrammar`."""
        accepted = self._grammar.accept(token_id)
        if accepted and token_id == self._tokens.message:
            mask = np.zeros(self._num_words, dtype=np.int32)
            self._grammar.fill(mask)
            self._is_last = not is_allowed(mask, self._tokens.end)
        return accepted
