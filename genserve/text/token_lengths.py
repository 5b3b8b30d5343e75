"""Token lengths: how many tokens a text has at least, to tell that it is too long without encoding it."""

from __future__ import annotations

import json
from typing import Any

import tokenizers

# Of what NFC makes a single byte, at most: three letters of Hangul, or a letter and its marks.
_NFC_BYTES = 4
_KEEP_ALL_TEXT = frozenset({"ByteLevel", "Digits", "Punctuation", "Split", "Sequence"})


class TokenLengths:
    """How many bytes of a text the longest token stands for.

    It is known of byte-level BPE, the tokenizer of most models: each byte of a text is in one of its tokens,
    unless the vocabulary lacks it. Other tokenizers may drop spaces, or give a run of unknown characters one
    token.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Read the vocabulary, in a tenth of a second."""
        self._longest = 0       # in bytes; 0: it is not known
        self._unknown = b""     # bytes that have no token
        factor = _bytes_that_become_one(backend.normalizer)
        added = backend.get_added_tokens_decoder().values()
        strips = any(token.lstrip or token.rstrip for token in added)
        if not factor or strips or not _keeps_all_text(backend.pre_tokenizer):
            return
        vocabulary = backend.get_vocab(with_added_tokens=False)
        # A character of a name in the vocabulary is one byte.
        lengths = (*map(len, vocabulary), *(len(token.content.encode()) for token in added))
        self._longest = factor * max(lengths)
        self._unknown = bytes(byte for byte, char in _alphabet().items() if char not in vocabulary)

    def has_more_tokens(self, text: str, than: int) -> bool:
        """Whether a text certainly has more tokens than this."""
        most_bytes = than * self._longest
        if not self._longest or len(text) <= most_bytes:
            return False
        return len(text.encode().translate(None, self._unknown)) > most_bytes


def _alphabet() -> dict[int, str]:
    """Return the characters by which names in a byte-level vocabulary spell bytes: GPT-2's."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def _bytes_that_become_one(normalizer: Any) -> int:
    """Return how many bytes of a text become one at most; 0: it is not known."""
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
    """Return a component and those within it."""
    inner = state.get("pretokenizers") or state.get("normalizers") or []
    return [state, *(part for each in inner for part in _parts(each))]
