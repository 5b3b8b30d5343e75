"""Repetition detection: the end of an answer that repeats a pattern of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from genserve.errors import InvalidRequest, require

MAX_REPEATED_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """The pattern of n tokens, repeated k times in a row, that ends the answer.

    Names and meanings are vLLM's.

    Raises:
        InvalidRequest: a value is out of range; `field` names it.
    """

    max_pattern_size: int           # tokens
    min_pattern_size: int = 1       # tokens
    min_count: int                  # occurrences in a row, the first one included

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            _require(type(value) is int and value >= 1, option.name, "must be a whole number, 1 or more")
        _require(self.min_count >= 2, "min_count", "must be at least 2")
        small = self.max_pattern_size * self.min_count <= MAX_REPEATED_TOKENS
        _require(small, "max_pattern_size", f"times min_count must be at most {MAX_REPEATED_TOKENS}")
        _require(
            self.min_pattern_size <= self.max_pattern_size,
            "min_pattern_size",
            "must be at most max_pattern_size",
        )

    def is_met(self, token_ids: Sequence[int], *, start: int) -> bool:
        """Return whether the tokens from `start` on end in such a pattern.

        If the last token is new among those before it, the cost is one search over `max_pattern_size` tokens.
        """
        length = len(token_ids)
        place = length - 1 - min(self.max_pattern_size, (length - start) // self.min_count)
        behind = length - self.min_pattern_size
        while place < behind:
            try:
                place = token_ids.index(token_ids[-1], place, behind)
            except ValueError:
                return False
            size = length - 1 - place
            first = length - size * self.min_count
            if token_ids[first : length - size] == token_ids[first + size :]:
                return True
            place += 1
        return False


def repetition_detection(value: object, *, field: str) -> RepetitionDetection:
    """Read a JSON object.

    Raises:
        InvalidRequest: the value is malformed; `field` names the place.
    """
    if isinstance(value, RepetitionDetection):
        return value
    names = [option.name for option in fields(RepetitionDetection)]
    if not isinstance(value, Mapping) or not set(value) <= {*names}:
        raise InvalidRequest(f"{field} must be an object with {', '.join(names)}", field=field)
    for name in ("max_pattern_size", "min_count"):
        _require(name in value, name, "is missing")
    return RepetitionDetection(**value)


def _require(holds: bool, name: str, rule: str) -> None:  # noqa: FBT001  # reads as a sentence
    require(holds, f"repetition_detection.{name}", rule)
