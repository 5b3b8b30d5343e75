"""Marks: finds the texts that structure an answer while the answer arrives in pieces."""

from __future__ import annotations

import re

_SPACE = re.compile(r"\s*")


class Cut(Exception):
    """The text ends in the middle of a mark."""


def squeezed(text: str) -> str:
    """Return a text without whitespace."""
    return "".join(text.split())


def past_space(text: str, start: int) -> int:
    """Return where the text after whitespace begins; raises Cut if there is none yet."""
    found = _SPACE.match(text, start)
    end = start if found is None else found.end()
    if end == len(text):
        raise Cut
    return end


def after(text: str, mark: str, start: int) -> int | None:
    """Return where the text after a mark begins, whitespace ignored; None: the mark is not there.

    Args:
        text: the text so far.
        mark: a text without whitespace.
        start: the mark may begin here, or after some whitespace.

    Raises:
        Cut: the text may become the mark.
    """
    at = start
    for sign in mark:
        if text[at : at + 1] != sign:
            at = past_space(text, at)
            if text[at] != sign:
                return None
        at += 1
    return at


def mark_start(text: str, mark: str, *, start: int) -> int:
    """Return where a mark is in a text from `start` on, or may begin at its end; else the text's length."""
    found = text.find(mark, start)
    if found >= 0:
        return found
    at = text.find(mark[0], max(start, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) if at < 0 else at
