"""Vocabulary: the names, the spellings and the lengths of the tokens that texts consist of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, Protocol

import tokenizers

# How many bytes NFC may turn into one, at most: three letters of Hangul, or a letter and its marks.
_NFC_BYTES = 4
MAX_KNOWN_SPELLINGS = 64
_KEEP_ALL_TEXT = frozenset({"ByteLevel", "Digits", "Punctuation", "Split", "Sequence"})


class TokenNames:
    """The names of some tokens, to search texts for.

    Attributes:
        pattern: matches any of the names.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        """Store the names by token id."""
        self._ids = {name: token_id for token_id, name in names.items()}
        longest_first = sorted(names.values(), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def split(self, text: str) -> list[str | int]:
        """Split a text at the names: the texts between them, and the ids of the tokens."""
        parts: list[str | int] = []
        end = 0
        for match in self.pattern.finditer(text):
            parts += [text[end : match.start()], self._ids[match[0]]]
            end = match.end()
        return [part for part in (*parts, text[end:]) if part != ""]


class _Vocabulary(Protocol):
    """The part of a tokenizer that `Spellings` uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        ...

    def token_texts(self) -> list[str]:
        """Return the text of each single token of the vocabulary, by id; empty for special ones."""
        ...


class Spellings:
    """Finds the token sequences that can contain a text, for banned words and DRY's sequence breakers.

    The text may begin and end within a token. If it needs several tokens, the tokens after the first are the
    tokenizer's encoding of the rest. Scans the vocabulary, and caches the latest texts. Safe from any thread.
    """

    def __init__(self, tokenizer: _Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, Sequence[Sequence[int]]] = {}

    def of(self, text: str) -> Sequence[Sequence[int]]:
        """Return each minimal sequence of token ids that contains the text."""
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= MAX_KNOWN_SPELLINGS:
                self._known.clear()
            found = self._known[text] = tuple(self._spell(text))
        return found

    @cached_property
    def _token_texts(self) -> list[str]:
        return self._tokenizer.token_texts()

    def _spell(self, text: str) -> Iterator[list[int]]:
        starts = [text[:length] for length in range(1, len(text))]
        rests = {
            start: self._tokenizer.encode(text[len(start) :], add_special_tokens=False) for start in starts
        }
        for token_id, token_text in enumerate(self._token_texts):
            if text in token_text:
                yield [token_id]
            elif token_text.endswith(tuple(starts)):
                yield from ([token_id, *rest] for start, rest in rests.items() if token_text.endswith(start))


class TokenLengths:
    """How many bytes the longest token stands for, which shows that a text is too long without encoding it.

    The number is known for byte-level BPE, the tokenizer of most models: each byte of a text is in one of its
    tokens, unless the vocabulary lacks the byte. Other tokenizers may drop spaces, or encode a run of unknown
    characters as one token.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Read the vocabulary, in a tenth of a second."""
        self._longest = 0       # in bytes; 0: unknown
        self._unknown = b""     # bytes that have no token
        factor = _bytes_that_become_one(backend.normalizer)
        added = backend.get_added_tokens_decoder().values()
        strips = any(token.lstrip or token.rstrip for token in added)
        if not factor or strips or not _keeps_all_text(backend.pre_tokenizer):
            return
        vocabulary = backend.get_vocab(with_added_tokens=False)
        # Each character of a name in the vocabulary stands for one byte.
        lengths = (*map(len, vocabulary), *(len(token.content.encode()) for token in added))
        self._longest = factor * max(lengths)
        self._unknown = bytes(byte for byte, char in _alphabet().items() if char not in vocabulary)

    def has_more_tokens(self, text: str, than: int) -> bool:
        """Whether a text certainly has more tokens than this."""
        most_bytes = than * self._longest
        if not self._longest or len(text) <= most_bytes:
            return False
        return len(text.encode().translate(None, self._unknown)) > most_bytes


def spells_bytes(decoder: Any) -> bool:
    """Whether the names of tokens spell their bytes whatever precedes them: a byte-level vocabulary."""
    return decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"


def spelled(name: str) -> bytes:
    """Return the bytes that the name of a token in a byte-level vocabulary spells."""
    values = [_values().get(char) for char in name]
    known = [value for value in values if value is not None]
    # The decoder treats a name with any other character as text.
    return bytes(known) if len(known) == len(name) else name.encode()


@cache
def _values() -> dict[str, int]:
    return {char: byte for byte, char in _alphabet().items()}


def _alphabet() -> dict[int, str]:
    """Return the characters by which names in a byte-level vocabulary spell bytes: GPT-2's."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def _bytes_that_become_one(normalizer: Any) -> int:
    """Return how many bytes of a text become one at most; 0: unknown."""
    if normalizer is None:
        return 1
    kinds = {part["type"] for part in _parts(json.loads(normalizer.__getstate__()))}
    return _NFC_BYTES if kinds <= {"NFC", "Sequence"} else 0


def _keeps_all_text(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return False
    parts = _parts(json.loads(pre_tokenizer.__getstate__()))
    kinds = {part["type"] for part in parts}
    return "ByteLevel" in kinds <= _KEEP_ALL_TEXT and all(part.get("behavior") != "Removed" for part in parts)


def _parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a component and all components within it."""
    inner = state.get("pretokenizers") or state.get("normalizers") or []
    return [state, *(part for each in inner for part in _parts(each))]
