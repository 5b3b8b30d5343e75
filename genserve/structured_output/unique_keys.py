"""Unique keys: forbids the tokens that would repeat a key within a JSON object.

llguidance enforces unique keys for the properties that a schema names, but no grammar can for names that may
be any text. Small models repeat such keys, sometimes forever.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from genserve.structured_output.json_escapes import ends_within_escape, unescaped

_QUOTE, _BACKSLASH = b'"\\'
_ESCAPED = re.compile(rb'["\\\x00-\x1f]')
_OBJECT, _ARRAY, _COMMA, _ENDS = ord("{"), ord("["), ord(","), b"}]"


class _SomeTokens:
    """Token ids, and the positions of their bits in a mask."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids, np.int64)
        self._words = self._ids // 32
        self._bits = np.uint32(1) << (self._ids % 32).astype(np.uint32)

    def allowed(self, mask: NDArray[np.int32]) -> list[int]:
        """Return the ids whose bits are set."""
        allowed: list[int] = self._ids[mask.view(np.uint32)[self._words] & self._bits != 0].tolist()
        return allowed

    def clear(self, mask: NDArray[np.int32]) -> None:
        """Clear the bits of these ids."""
        np.bitwise_and.at(mask.view(np.uint32), self._words, ~self._bits)


class TokenBytes:
    """The texts of all tokens, as bytes, in the order of their ids and sorted."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.by_id = texts
        ids = sorted(range(len(texts)), key=texts.__getitem__)
        self._ids = ids
        self._sorted = [texts[token_id] for token_id in ids]
        # Tokens that may contain a whole key: between two quotes, or, if they begin within a string, with
        # three.
        self.with_keys = {False: self._with_quotes(2), True: self._with_quotes(3)}     # by `within_string`
        self.with_quote = self._with_quotes(1)
        # Tokens that may end a key which the object already has in another spelling.
        self.with_escape = _SomeTokens(
            [i for i, text in enumerate(texts) if -1 < text.find(b"\\") < text.rfind(b'"') - 1]
        )

    def _with_quotes(self, num_quotes: int) -> _SomeTokens:
        return _SomeTokens([i for i, text in enumerate(self.by_id) if text.count(b'"') >= num_quotes])

    def beginning_with(self, text: bytes) -> list[int]:
        """Return the ids of the tokens that begin with a text that ends in a quote."""
        after = text[:-1] + bytes([_QUOTE + 1])
        return self._ids[bisect_left(self._sorted, text) : bisect_left(self._sorted, after)]


class _Scanner:
    """The position in a JSON text, which is valid so far.

    Attributes:
        keys: the keys of the innermost object, with escapes decoded.
        key: the key so far, as the text spells it; None: the position is not within a key.
        within_string: whether the position is within a key or another string.
        repeats: whether an object has had the same key twice.
    """

    __slots__ = ("_escaped", "_expects_key", "_outer", "key", "keys", "repeats", "within_string")

    def __init__(self) -> None:
        self.keys: frozenset[bytes] = frozenset()
        self.key: bytes | None = None
        self.repeats = False
        self._outer: tuple[tuple[frozenset[bytes], bool], ...] = ()     # keys, and whether it is an object
        self._expects_key = False
        self.within_string = False
        self._escaped = False

    def copy(self) -> Self:
        copied = type(self)()
        for name in self.__slots__:
            setattr(copied, name, getattr(self, name))
        return copied

    def read(self, text: bytes) -> None:
        if self.within_string and not self._escaped and _QUOTE not in text and _BACKSLASH not in text:
            self.key = None if self.key is None else self.key + text
            return
        for index, byte in enumerate(text):
            if self.within_string:
                self._read_string(byte, text[index : index + 1])
            elif byte == _QUOTE:
                self.within_string, self.key = True, b"" if self._expects_key else None
                self._expects_key = False
            elif byte in (_OBJECT, _ARRAY):
                is_object = byte == _OBJECT
                self._outer = (*self._outer, (self.keys, is_object))
                self.keys, self._expects_key = frozenset(), is_object
            elif byte in _ENDS and self._outer:
                *outer, (self.keys, _) = self._outer
                self._outer, self._expects_key = tuple(outer), False
            elif byte == _COMMA:
                self._expects_key = bool(self._outer) and self._outer[-1][1]

    def _read_string(self, byte: int, text: bytes) -> None:
        if byte == _QUOTE and not self._escaped:
            if self.key is not None:
                key = unescaped(self.key)
                self.repeats |= key in self.keys
                self.keys |= {key}
            self.within_string, self.key = False, None
            return
        self._escaped = byte == _BACKSLASH and not self._escaped
        if self.key is not None:
            self.key += text


def _spelled(text: bytes) -> bytes:
    """Return a part of a key, spelled with as few escapes as possible."""
    return _ESCAPED.sub(lambda one: json.dumps(one[0].decode())[1:-1].encode(), text)


class UniqueKeys:
    """The keys of one answer, whose text is JSON."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._scanner = _Scanner()

    def accept(self, token_id: int) -> None:
        """Read a token of the answer."""
        if token_id < len(self._tokens.by_id):
            self._scanner.read(self._tokens.by_id[token_id])

    def forbid(self, mask: NDArray[np.int32]) -> None:
        """Clear the bits of the tokens that would complete a repeated key, unless no other token is allowed.

        Args:
            mask: [W], as `StructuredOutputGrammar.fill` sets it.
        """
        scanner = self._scanner
        tokens, key = self._tokens, scanner.key
        with_keys = tokens.with_keys[scanner.within_string].allowed(mask)
        if key is not None and scanner.keys:
            ending = tokens.with_quote if ends_within_escape(key) else tokens.with_escape
            with_keys += ending.allowed(mask)
        forbidden = [token_id for token_id in with_keys if self._repeats(token_id)]
        if key is not None:
            begun = unescaped(key)
            for known in scanner.keys:
                if known.startswith(begun):
                    forbidden += tokens.beginning_with(_spelled(known[len(begun) :]) + b'"')
        if forbidden:
            allowed = mask.copy()
            _SomeTokens(forbidden).clear(mask)
            if not mask.any():
                mask[:] = allowed

    def _repeats(self, token_id: int) -> bool:
        scanner = self._scanner.copy()
        scanner.read(self._tokens.by_id[token_id])
        return scanner.repeats and not self._scanner.repeats

