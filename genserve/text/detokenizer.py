"""Detokenizer: turns one token sequence into text, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import islice
from types import MappingProxyType
from typing import Protocol

NO_TOKENS: Mapping[int, str] = MappingProxyType({})
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character has at most 4 bytes, so an incomplete one is within the last 3 tokens.
NUM_CONTEXT_TOKENS = 4
MAX_WINDOW_TOKENS = 12


class ByteTokens:
    """The tokens of a vocabulary that stand for one byte each (`<0x0A>`), and the characters they spell.

    The library decodes a run of byte tokens as a whole: one invalid byte turns all bytes of the run into
    U+FFFD, also the bytes of valid characters. Here a character is complete with its last byte, and only an
    invalid byte becomes U+FFFD, as in SentencePiece and llama.cpp.

    Args:
        ids: the token of each byte; empty: the vocabulary has none.

    Attributes:
        values: the bytes, by token id.
    """

    def __init__(self, ids: Mapping[int, int]) -> None:
        self.values = {token_id: value for value, token_id in ids.items()}
        self._ids = ids
        # An invalid byte is decoded as the bytes of U+FFFD, so that it does not spoil the rest of the run.
        self._replacement = [ids[value] for value in REPLACEMENT.encode() if value in ids]

    def characters(self, run: bytes) -> tuple[list[int], bytes]:
        """Return the tokens of the characters that are complete, and the bytes of an incomplete one.

        Args:
            run: the bytes of an incomplete character, and the next byte.
        """
        ids: list[int] = []
        while run:
            try:
                run.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                ids += self._replacement
                run = run[1:]
            else:
                ids += [self._ids[value] for value in run]
                run = b""
        return ids, run

    def replaced(self, run: bytes) -> list[int]:
        """Return the tokens of as many U+FFFD as there are bytes in an incomplete character."""
        return self._replacement * len(run)

    def begins_within_character(self, token_ids: Sequence[int]) -> bool:
        """Whether the first token continues a character."""
        value = self.values.get(token_ids[0])
        return value is not None and value & 0xC0 == 0x80


class TokenDecoder(Protocol):
    """The part of a tokenizer that a detokenizer uses."""

    @property
    def byte_tokens(self) -> ByteTokens:
        """The tokens that stand for one byte each."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`; invalid UTF-8 becomes U+FFFD."""

    def is_silent(self, token_id: int) -> bool:
        """Whether the token never adds to a text, such as one outside of the vocabulary."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that a token adds to any text; None: they depend on the text."""


class Detokenizer:
    """Turns the ids of one token sequence into text, piece by piece and never half a character.

    The text of `behind`, followed by the joined pieces, equals the `decode` of all ids, except for an invalid
    run of byte tokens (`ByteTokens`). Each token takes amortised constant time, whatever the ids are.
    (`tokenizers.decoders.DecodeStream` 0.23 decodes all ids since the last valid character again, so that
    runs of invalid bytes or special tokens take quadratic time; and it raises on some bytes.)

    Args:
        vocabulary: decodes token ids.
        bare: the texts by id of tokens between which the decoder writes no space.
        behind: the ids whose text the pieces continue, such as a prompt. Many decoders drop the space that
            begins a text. A character that these ids leave incomplete is part of the piece that completes it.
    """

    def __init__(
        self, vocabulary: TokenDecoder, *, bare: Mapping[int, str] = NO_TOKENS, behind: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._bytes = vocabulary.byte_tokens
        self._bare = bare
        self._follows_bare = False
        self._window: list[int] = []        # the latest ids, enough to decode the next one
        self._num_sent = 0                  # leading characters of the window's text that were returned
        self._run = b""                     # byte tokens of an incomplete character, not in the window yet
        self._rest_behind = ""              # U+FFFD at the end of `behind`, which no piece includes
        audible = (token_id for token_id in reversed(behind) if not vocabulary.is_silent(token_id))
        for token_id in reversed([*islice(audible, NUM_CONTEXT_TOKENS)]):
            self.push(token_id)
        self._rest_behind = self._rest() if behind else ""

    def fork(self) -> Detokenizer:
        """Return an independent copy with the same ids."""
        fork = copy(self)
        fork._window = [*self._window]
        return fork

    def push(self, token_id: int) -> str:
        """Append one id, and return the text that later ids cannot change; may be empty."""
        if self._vocabulary.is_silent(token_id):
            return ""
        if self._run or token_id in self._bytes.values:
            ids, self._run = self._joined(token_id)
            piece = self._extend(ids) if ids else ""
        else:
            piece = self._extend([token_id])
        return self._without_space(token_id, piece) if self._bare else piece

    def peek(self, token_id: int) -> str:
        """Return the rest of the text if this id were the next and last one."""
        if self._vocabulary.is_silent(token_id):
            return self._rest()
        ids, run = self._joined(token_id)
        text = self._vocabulary.decode([*self._window, *ids, *self._bytes.replaced(run)])
        return text[self._num_sent :].removeprefix(self._rest_behind)

    def spell(self, token_id: int, *, peeked: str | None = None) -> bytes:
        """Return the bytes that this id would add if it were the next one; joined, the bytes make the text.

        Args:
            token_id: any id.
            peeked: the result of `peek` for this id, if the caller has it.
        """
        if self._vocabulary.is_silent(token_id):
            return b""
        own = self._vocabulary.token_bytes(token_id)
        if own is not None:
            return own
        text = self.peek(token_id) if peeked is None else peeked
        return text.removeprefix(REPLACEMENT * len(self._run)).encode()

    def flush(self) -> str:
        """Return the rest of the text; an incomplete character becomes U+FFFD."""
        rest = self._rest()
        self._window, self._num_sent, self._run, self._rest_behind = [], 0, b"", ""
        return rest

    def _rest(self) -> str:
        text = self._vocabulary.decode([*self._window, *self._bytes.replaced(self._run)])
        return text[self._num_sent :].removeprefix(self._rest_behind)

    def _joined(self, token_id: int) -> tuple[list[int], bytes]:
        """Return the ids that follow the window if this id is the next, and an incomplete character."""
        value = self._bytes.values.get(token_id)
        if value is None:
            return [*self._bytes.replaced(self._run), token_id], b""
        return self._bytes.characters(self._run + bytes([value]))

    def _without_space(self, token_id: int, piece: str) -> str:
        text = self._bare.get(token_id)
        follows_bare, self._follows_bare = self._follows_bare, text is not None
        return text if text is not None and follows_bare else piece

    def _extend(self, ids: list[int]) -> str:
        self._window += ids
        text = self._vocabulary.decode(self._window)
        certain = _num_certain(text)
        piece = text[self._num_sent : certain]
        self._num_sent = certain
        if len(self._window) > MAX_WINDOW_TOKENS:
            del self._window[:-NUM_CONTEXT_TOKENS]
            while self._bytes.begins_within_character(self._window):
                del self._window[0]
            self._num_sent = _num_certain(self._vocabulary.decode(self._window))
        if self._rest_behind and piece:
            piece, self._rest_behind = piece.removeprefix(self._rest_behind), ""
        return piece


def _num_certain(text: str) -> int:
    """Return how many characters no later token can change: all but an incomplete one at the end."""
    return len(text) - text.endswith(REPLACEMENT)
