"""Closing grammar: brings the JSON of an answer to its end when few tokens are left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genserve.sampling.grammar_bitmask import ForkableGrammar, allow_only, is_allowed
from genserve.text.argument_syntax import JSON
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_formats import ToolFormat

MAX_STEPS = 512     # tokens in the way to the end
# A search for the way takes milliseconds, and is pointless while more tokens than this are left.
FIRST_LOOK = 512
# Tokens in reserve when the answer takes the way: the rest of a character that has begun may need them.
LAST_SPARE = 4
# With fewer tokens in reserve than this, or than a whole call takes, no optional part begins: no further
# call, item or property.
FEW_SPARE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonTokens:
    """The tokens of a vocabulary that end parts of JSON."""

    lengths: NDArray[np.int32]      # [V], the lengths of the texts of all tokens
    ending_ids: tuple[int, ...]     # the tokens that end an answer
    brace: int                      # }
    bracket: int                    # ]
    quote: int                      # "
    comma: int                      # ,
    letter: int                     # z, which JSON has in strings only
    newline: int | None             # \n, which JSON has in no string

    @staticmethod
    def of(tokenizer: Tokenizer, *, vocab_size: int) -> JsonTokens | None:
        """Return the tokens of a vocabulary that end parts of JSON; None: the vocabulary lacks one."""
        texts = tokenizer.token_texts()[:vocab_size]
        ids = {text: token_id for token_id, text in enumerate(texts) if len(text) == 1}
        if not ids.keys() >= {*'}]",z'}:
            return None
        lengths = np.zeros(vocab_size, dtype=np.int32)
        lengths[: len(texts)] = [len(text) for text in texts]
        ending = [token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size]
        return JsonTokens(
            lengths=lengths,
            ending_ids=tuple(ending),
            brace=ids["}"],
            bracket=ids["]"],
            quote=ids['"'],
            comma=ids[","],
            letter=ids["z"],
            newline=ids.get("\n"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnds:
    """The marks that end parts of tool calls in one format, as tokens, unless the signs of JSON end them."""

    text: tuple[int, ...] = ()                  # after a value that is not JSON
    others: tuple[tuple[int, ...], ...] = ()    # after a key, the arguments, and the calls

    @staticmethod
    def of(tokenizer: Tokenizer, tool_format: ToolFormat) -> CallEnds:
        """Return the marks of a format."""

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()

        syntax = tool_format.arguments
        others = [] if syntax == JSON else [ids(syntax.key_end), ids(tool_format.after_arguments)]
        others.append(ids(tool_format.closing))
        return CallEnds(text=ids(syntax.text_end), others=tuple(filter(None, others)))


class ClosingGrammar:
    """Follows another grammar, and forces a short way to its end before the tokens run out.

    On this way strings end at once, and arrays and objects get no more items than they must have. So the
    answer is complete, but may be shorter than the model wanted, which `cut` tells. The way is searched more
    often as the end comes near. Implements `StructuredOutputGrammar`.

    Args:
        grammar: the grammar to follow.
        tokens: the vocabulary's tokens that end parts of JSON.
        room: how many tokens the answer may have.
        ends: the tokens that end parts of calls.
    """

    def __init__(
        self,
        grammar: ForkableGrammar,
        tokens: JsonTokens,
        *,
        room: int,
        ends: CallEnds = CallEnds(),
    ) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._ends = ends
        self._num_left = room
        self._next_look = min(room, FIRST_LOOK)
        self._has_few = False
        self._way: list[int] | None = None      # the rest of the way to the end; None: not taken yet
        self._mark: list[int] = []              # the rest of a mark that ends a part
        self._longest_way = len(self._way_to_end() or ())

    @property
    def complete(self) -> bool:
        """See `StructuredOutputGrammar`."""
        return self._way == [] or self._grammar.complete

    @property
    def cut(self) -> bool:
        """See `StructuredOutputGrammar`."""
        return self._way is not None

    @property
    def failure(self) -> str:
        """See `StructuredOutputGrammar`."""
        return self._grammar.failure

    def fill(self, mask: NDArray[np.int32]) -> None:
        """See `StructuredOutputGrammar`."""
        if self._way is None and self._num_left <= self._next_look:
            self._look()
        if forced := self._way or self._mark:
            allow_only(mask, forced[:1])
            return
        self._grammar.fill(mask)
        if not self._has_few or is_allowed(mask, self._tokens.letter):
            return
        marks = ((self._tokens.brace,), (self._tokens.bracket,), *self._ends.others)
        if mark := _first_accepted(self._grammar, marks, mask):
            self._mark = [*mark]
            allow_only(mask, mark[:1])
        elif kept := [token_id for token_id in self._tokens.ending_ids if is_allowed(mask, token_id)]:
            allow_only(mask, kept)

    def accept(self, token_id: int) -> bool:
        """See `StructuredOutputGrammar`."""
        self._num_left -= 1
        if forced := self._way or self._mark:
            forced.pop(0)
        return self._grammar.accept(token_id)

    def _look(self) -> None:
        """Take the way to the end if there is room for nothing else, or choose when to look again."""
        way = self._way_to_end()
        spare = self._num_left - len(way) if way is not None else self._num_left
        if way and 0 <= spare <= LAST_SPARE:
            self._way = way
        self._longest_way = max(self._longest_way, len(way or ()))
        few = max(FEW_SPARE, self._longest_way)
        self._has_few = way is None or spare <= few
        num_tokens = spare // 2 if self._has_few else min(spare // 2, spare - few)
        self._next_look = self._num_left - max(1, num_tokens)

    def _way_to_end(self) -> list[int] | None:
        """Return the tokens of a short way to the end; None: every way needs MAX_STEPS or more."""
        grammar = self._grammar.fork()
        if grammar is None:
            return None
        tokens, way = self._tokens, list[int]()
        mask = np.zeros(-(-len(tokens.lengths) // 32), dtype=np.int32)
        for _ in range(min(MAX_STEPS, self._num_left + 1)):
            if grammar.complete:
                return way
            grammar.fill(mask)
            if any(is_allowed(mask, token_id) for token_id in tokens.ending_ids):
                return way
            added = self._closing_mark(grammar, mask) or [self._closing_token(mask)]
            way += added
            if not all(map(grammar.accept, added)):
                return None
        return None

    def _closing_mark(self, grammar: ForkableGrammar, mask: NDArray[np.int32]) -> Sequence[int]:
        """Return the mark that may follow; empty: no mark may."""
        marks = [self._ends.text] if self._ends.text else []
        if not self._is_free(mask):
            marks += self._ends.others
        elif not self._is_plain_text(mask):
            return ()
        return _first_accepted(grammar, marks, mask)

    def _is_free(self, mask: NDArray[np.int32]) -> bool:
        """Whether a string may go on."""
        return all(is_allowed(mask, token_id) for token_id in (self._tokens.letter, self._tokens.brace))

    def _is_plain_text(self, mask: NDArray[np.int32]) -> bool:
        """Whether a string that is not JSON may go on."""
        newline = self._tokens.newline
        if not self._ends.text or newline is None:
            return False
        return is_allowed(mask, newline) and self._is_free(mask)

    def _closing_token(self, mask: NDArray[np.int32]) -> int:
        """Return the allowed token that leads most directly to the end."""
        tokens = self._tokens
        if self._is_plain_text(mask):       # which is too short
            return tokens.letter
        order = (tokens.brace, tokens.bracket, tokens.quote, tokens.comma)
        for token_id in order[2:3] if self._is_free(mask) else order:
            if is_allowed(mask, token_id):
                return token_id
        # What remains is fixed text, a part of a word, or characters that a string must have.
        allowed = np.unpackbits(mask.view(np.uint8), count=len(tokens.lengths), bitorder="little")
        return int(np.argmax((tokens.lengths + 1) * allowed))


def _first_accepted(
    grammar: ForkableGrammar, marks: Iterable[Sequence[int]], mask: NDArray[np.int32]
) -> Sequence[int]:
    """Return the first of some marks that may follow; empty: none may. `mask` has the tokens that may."""
    return next((ids for ids in marks if is_allowed(mask, ids[0]) and _accepts(grammar, ids)), ())


def _accepts(grammar: ForkableGrammar, token_ids: Sequence[int]) -> bool:
    fork = grammar.fork()
    return fork is not None and all(map(fork.accept, token_ids))
