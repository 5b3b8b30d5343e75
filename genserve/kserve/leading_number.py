"""Leading number: the whole number at the beginning of a text, as C's `strtol` reads it."""

from __future__ import annotations

import re

__all__ = ["leading_number"]

_NUMBER = re.compile(r"\s*([+-]?[0-9]+)")
_MANY_DIGITS = 40  # beyond any number of 64 bits, and well within what `int` takes


def leading_number(text: str) -> int | None:
    """Return the number; what follows it does not count. None: there is none.

    One beyond 64 bits is some number beyond 64 bits.
    """
    found = _NUMBER.match(text)
    return None if found is None else int(found[1][:_MANY_DIGITS])
