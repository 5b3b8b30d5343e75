"""Detokenizer: the text of one token sequence, as it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Protocol

__all__ = ["Detokenizer", "Vocabulary"]

NOTHING: Mapping[int, str] = MappingProxyType({})
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character has at most 4 bytes, so an unfinished one lies within the last 3 tokens.
NUM_CONTEXT_TOKENS = 4
MAX_WINDOW_TOKENS = 12


class Vocabulary(Protocol):
    """What a detokenizer asks of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        ...

    def is_silent(self, token_id: int) -> bool:
        """Whether the token never adds to a text, as one that is not in the vocabulary."""
        ...

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether the token stands for one byte (`<0x0A>`) and is decoded with the bytes around it."""
        ...


class Detokenizer:
    """Turns the ids of one token sequence into text, piece by piece and never half a character.

    The joined pieces equal the `decode` of all ids, and each token costs amortised constant time whatever the
    ids are. (`tokenizers.decoders.DecodeStream` 0.23 reads all since the last valid character again, so that
    invalid bytes or special tokens in a row cost quadratic time, and it raises on some byte-fallback tokens.)

    Byte-fallback tokens are held back to the end of their run, because such a run is decoded as a whole: one
    invalid byte turns the characters before it into U+FFFD too.
    """

    def __init__(self, vocabulary: Vocabulary, *, bare: Mapping[int, str] = NOTHING) -> None:
        """Begin a text; of the tokens in `bare`, one behind another adds this and no space before it."""
        self._vocabulary = vocabulary
        self._bare = bare
        self._is_behind_bare = False
        self._window: list[int] = []        # the latest ids: enough to decode the next one
        self._num_sent = 0                  # leading characters of the window's text that are out already
        self._byte_run: list[int] = []      # not in the window yet

    def fork(self) -> Detokenizer:
        """Return one that has the same ids, and goes on by itself."""
        fork = copy(self)
        fork._window, fork._byte_run = [*self._window], [*self._byte_run]
        return fork

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that has become certain, which may be empty."""
        if self._vocabulary.is_silent(token_id):
            return ""
        if self._vocabulary.is_byte_fallback(token_id):
            self._byte_run.append(token_id)
            return ""
        piece = self._extend(token_id)
        return self._without_space(token_id, piece) if self._bare else piece

    def peek(self, token_id: int) -> str:
        """The text that there would be behind what is out already, if this id came next and were the last."""
        return self._vocabulary.decode([*self._window, *self._byte_run, token_id])[self._num_sent :]

    def flush(self) -> str:
        """The rest of the text; a character that stayed unfinished is U+FFFD."""
        self._window += self._byte_run
        rest = self._vocabulary.decode(self._window)[self._num_sent :]
        self._window, self._num_sent, self._byte_run = [], 0, []
        return rest

    def _without_space(self, token_id: int, piece: str) -> str:
        text = self._bare.get(token_id)
        is_behind, self._is_behind_bare = self._is_behind_bare, text is not None
        return piece if text is None or not is_behind else text

    def _extend(self, token_id: int) -> str:
        self._window += [*self._byte_run, token_id]
        self._byte_run = []
        text = self._vocabulary.decode(self._window)
        certain = _num_certain(text)
        piece = text[self._num_sent : certain]
        self._num_sent = certain
        if len(self._window) > MAX_WINDOW_TOKENS:
            del self._window[:-NUM_CONTEXT_TOKENS]
            self._num_sent = _num_certain(self._vocabulary.decode(self._window))
        return piece


def _num_certain(text: str) -> int:
    """How many characters no later token can change: all, but for an unfinished one at the end."""
    return len(text) - text.endswith(REPLACEMENT)
