"""Detokenizer: the text of one token sequence, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Protocol

NO_TOKENS: Mapping[int, str] = MappingProxyType({})
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character has at most 4 bytes, so an incomplete one is within the last 3 tokens.
NUM_CONTEXT_TOKENS = 4
MAX_WINDOW_TOKENS = 12


class TokenDecoder(Protocol):
    """The part of a tokenizer that a detokenizer uses."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`; invalid UTF-8 becomes U+FFFD."""
        ...

    def is_silent(self, token_id: int) -> bool:
        """Whether the token never adds to a text, such as one outside of the vocabulary."""
        ...

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether the token is one byte (`<0x0A>`), which is decoded together with the bytes around it."""
        ...


class Detokenizer:
    """Turns the ids of one token sequence into text, piece by piece and never half a character.

    The joined pieces equal the `decode` of all ids, and each token takes amortised constant time for any ids.
    (`tokenizers.decoders.DecodeStream` 0.23 decodes all ids since the last valid character again, so that
    runs of invalid bytes or special tokens take quadratic time. It raises on some byte-fallback tokens.)

    Byte-fallback tokens are held back until their run ends, because such a run is decoded as a whole: one
    invalid byte turns the characters before it into U+FFFD too.

    Args:
        vocabulary: decodes token ids.
        bare: tokens that follow each other without a space: their texts by id.
    """

    def __init__(self, vocabulary: TokenDecoder, *, bare: Mapping[int, str] = NO_TOKENS) -> None:
        self._vocabulary = vocabulary
        self._bare = bare
        self._follows_bare = False
        self._window: list[int] = []        # the latest ids, enough to decode the next one
        self._num_sent = 0                  # leading characters of the window's text that were returned
        self._byte_run: list[int] = []      # not in the window yet

    def fork(self) -> Detokenizer:
        """Return an independent copy with the same ids."""
        fork = copy(self)
        fork._window, fork._byte_run = [*self._window], [*self._byte_run]
        return fork

    def push(self, token_id: int) -> str:
        """Append one id, and return the text that later ids cannot change; may be empty."""
        if self._vocabulary.is_silent(token_id):
            return ""
        if self._vocabulary.is_byte_fallback(token_id):
            self._byte_run.append(token_id)
            return ""
        piece = self._extend(token_id)
        return self._without_space(token_id, piece) if self._bare else piece

    def peek(self, token_id: int) -> str:
        """Return the rest of the text if this id were the next and last one."""
        return self._vocabulary.decode([*self._window, *self._byte_run, token_id])[self._num_sent :]

    def flush(self) -> str:
        """Return the rest of the text; an incomplete character becomes U+FFFD."""
        self._window += self._byte_run
        rest = self._vocabulary.decode(self._window)[self._num_sent :]
        self._window, self._num_sent, self._byte_run = [], 0, []
        return rest

    def _without_space(self, token_id: int, piece: str) -> str:
        text = self._bare.get(token_id)
        follows_bare, self._follows_bare = self._follows_bare, text is not None
        return text if text is not None and follows_bare else piece

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
    """Return how many characters no later token can change: all but an incomplete one at the end."""
    return len(text) - text.endswith(REPLACEMENT)
