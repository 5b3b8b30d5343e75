"""Spellings: the token sequences in which a text can stand inside another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol

__all__ = ["Spellings", "TokenTexts"]

MAX_KNOWN = 64


class TokenTexts(Protocol):
    """What spellings ask of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        ...

    def token_texts(self) -> list[str]:
        """The text of each token of the vocabulary alone, by id; empty for a special one."""
        ...


class Spellings:
    """Finds spellings by a look at the whole vocabulary, and keeps those of the latest texts.

    A text may begin anywhere in a token, and end anywhere in one. Where it needs several, those after the
    first are as the tokenizer writes the rest of it. Safe from any thread.
    """

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, Sequence[Sequence[int]]] = {}

    def of(self, text: str) -> Sequence[Sequence[int]]:
        """Return each sequence of token ids that has the text and would not without its first or last one."""
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            found = self._known[text] = tuple(self._spell(text))
        return found

    @cached_property
    def _token_texts(self) -> list[str]:
        return self._tokenizer.token_texts()

    def _spell(self, text: str) -> Iterator[list[int]]:
        begun = [text[:length] for length in range(1, len(text))]
        rests = {part: self._tokenizer.encode(text[len(part) :], add_special_tokens=False) for part in begun}
        for token_id, own in enumerate(self._token_texts):
            if text in own:
                yield [token_id]
            elif own.endswith(tuple(begun)):
                yield from ([token_id, *rest] for part, rest in rests.items() if own.endswith(part))
