"""Strings of all planes of Unicode, and the ways to write them in JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping

__all__ = ["SPELLINGS", "random_strings"]

_RANGES = (
    (0x00, 0x20),           # control characters
    (0x20, 0x7F),
    (0x80, 0x800),          # two bytes in UTF-8
    (0x800, 0xD800),        # three
    (0xE000, 0x10000),
    (0x10000, 0x20000),     # astral, two surrogates
    (0x20000, 0x110000),
)
_WORDS = (
    *('"', "\\", "/", "://", "a", "</b>", "\\u0041", "caf\u00e9", "\u4e16\u754c"),
    *("\u2028", "\ufeff", "\x7f", "\U0001f600"),
)


def random_strings(num_strings: int, *, seed: int, max_parts: int = 4) -> list[str]:
    """Return different strings, each of up to `max_parts` characters of any plane or words."""
    rng = random.Random(seed)
    strings: dict[str, bool] = {}
    while len(strings) < num_strings:
        parts = [
            rng.choice(_WORDS) if rng.random() < 0.4 else chr(rng.randrange(*rng.choice(_RANGES)))
            for _ in range(rng.randint(1, max_parts))
        ]
        strings["".join(parts)] = True
    return list(strings)


def _raw(text: str) -> str:
    # The one character that JSON may have raw, and grammars have not.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _all_by_code(text: str) -> str:
    units = text.encode("utf-16-be")
    codes = [units[at] << 8 | units[at + 1] for at in range(0, len(units), 2)]
    return '"' + "".join(rf"\u{code:04{'X' if code % 2 else 'x'}}" for code in codes) + '"'


# By its name, how a string is written in JSON.
SPELLINGS: Mapping[str, Callable[[str], str]] = {
    "raw": _raw,
    "ascii": json.dumps,
    "escaped": lambda text: json.dumps(text).replace("/", r"\/"),
    "by code": _all_by_code,
}
