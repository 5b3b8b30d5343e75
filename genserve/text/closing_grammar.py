"""Closing grammar: brings the JSON of an answer to its end when the room for tokens runs out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genserve.sampling.grammar_bitmask import ForkableGrammar, allow_only, is_allowed
from genserve.text.tokenizer import Tokenizer

MAX_STEPS = 512     # of a way to the end
# A search for the way takes milliseconds, and is pointless while more tokens than this are left.
FIRST_LOOK = 512
# The tokens to spare when the way is taken: within a character, it is longer by the character's other bytes.
LAST_SPARE = 4
# With fewer tokens to spare than this, or than a whole call takes, no optional part begins: no further call,
# item or property.
FEW_SPARE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonTokens:
    """The tokens of a vocabulary that end parts of JSON."""

    lengths: NDArray[np.int32]      # [V] of the texts of all tokens
    ending_ids: tuple[int, ...]     # the tokens that end an answer
    brace: int                      # }
    bracket: int                    # ]
    quote: int                      # "
    comma: int                      # ,
    letter: int                     # z, which JSON has in strings only

    @staticmethod
    def of(tokenizer: Tokenizer, *, vocab_size: int) -> JsonTokens | None:
        """Return the tokens of a vocabulary; None: it lacks one of them."""
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
        )


class ClosingGrammar:
    """Follows another grammar, and forces a short way to its end before the room is used up.

    On this way strings end at once, and arrays and objects have no more items than they must. So the answer
    is complete, and may be shorter than the model wanted: `cut` says so. The way is searched at ever shorter
    intervals as the end comes near. Implements `StructuredOutputGrammar`.

    Args:
        grammar: to follow.
        tokens: of the vocabulary.
        room: how many tokens the answer may have.
    """

    def __init__(self, grammar: ForkableGrammar, tokens: JsonTokens, *, room: int) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._num_left = room
        self._next_look = min(room, FIRST_LOOK)
        self._has_few = False
        self._way: list[int] | None = None      # the rest of it, once it is taken
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
        if self._way:
            allow_only(mask, self._way[:1])
            return
        self._grammar.fill(mask)
        if self._has_few and not is_allowed(mask, self._tokens.letter):
            for token_ids in ((self._tokens.brace,), (self._tokens.bracket,), self._tokens.ending_ids):
                if kept := [token_id for token_id in token_ids if is_allowed(mask, token_id)]:
                    allow_only(mask, kept)
                    return

    def accept(self, token_id: int) -> bool:
        """See `StructuredOutputGrammar`."""
        self._num_left -= 1
        if self._way:
            self._way.pop(0)
        return self._grammar.accept(token_id)

    def _look(self) -> None:
        """Take the way to the end if there is room for nothing else; else choose when to look again."""
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
        """Return the tokens of a short way to the end; None: there is none of less than MAX_STEPS."""
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
            way.append(self._closing_token(mask))
            if not grammar.accept(way[-1]):
                return None
        return None

    def _closing_token(self, mask: NDArray[np.int32]) -> int:
        """Return the token that comes closest to the end."""
        tokens = self._tokens
        is_free_string = is_allowed(mask, tokens.letter) and is_allowed(mask, tokens.brace)
        order = (tokens.brace, tokens.bracket, tokens.quote, tokens.comma)
        for token_id in order[2:3] if is_free_string else order:
            if is_allowed(mask, token_id):
                return token_id
        # Text that is fixed, a part of a word, or characters that a string must have.
        allowed = np.unpackbits(mask.view(np.uint8), count=len(tokens.lengths), bitorder="little")
        return int(np.argmax((tokens.lengths + 1) * allowed))
