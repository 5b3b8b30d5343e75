"""Parameter table: the rows that describe sampling parameters, and the validation by them.

The rows are the fields of `SamplingParams`. From them come the validation, the bodies of the dialects, the
tensors of Triton's clients, `SamplingOptions` and the reference of sampling parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from genserve.errors import InvalidRequest, require

# The table of the reference that has the row, and its heading there and in docs/sampling.md.
Section: TypeAlias = Literal["logits", "draw", "beams", "end", "text", "logprobs", "prompt"]
SECTIONS: Mapping[Section, str] = {
    "logits": "Edits of the logits", "draw": "The draw", "beams": "Beam search", "end": "Where the text ends",
    "text": "The text", "logprobs": "Log-probabilities", "prompt": "The prompt",
}
_DEFAULT: Any = object()        # means: the default of the field
# The kinds of values in messages.
_WORDS: Mapping[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a parameter takes; a NaN is never one of them."""

    low: float
    high: float = math.inf
    low_means: str = ""             # what the lowest number means, if that is special
    above: bool = False             # `low` itself is out of range
    below: bool = False             # `high` itself is out of range
    extra: int | None = None        # one number more
    extra_means: str = ""

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.above else value >= self.low
        below = value < self.high if self.below else value <= self.high
        return (above and below) or (self.extra is not None and value == self.extra)

    def as_json_schema(self) -> dict[str, Any]:
        """Return the keywords of a JSON schema; `extra` is not among them."""
        keywords: dict[str, Any] = {"exclusiveMinimum" if self.above else "minimum": self.low}
        if self.high != math.inf:
            keywords["exclusiveMaximum" if self.below else "maximum"] = self.high
        return keywords

    def __str__(self) -> str:
        low = _written(self.low) + (f" ({self.low_means})" if self.low_means else "")
        high = _written(self.high)
        if self.above:
            text = f"above {low} and at most {high}"
        elif self.below:
            text = f"at least {low} and below {high}"
        else:
            text = f"at least {low}" if self.high == math.inf else f"between {low} and {high}"
        return text if self.extra is None else f"{self.extra} ({self.extra_means}), or {text}"


def _written(number: float) -> str:
    if math.isinf(number) or abs(number) < 2**31 - 1:
        return f"{number}"
    exponent = round(math.log2(abs(number)))
    return ("-" if number < 0 else "") + f"2^{exponent}" + ("" if abs(number) == 2**exponent else " - 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """The row of one parameter."""

    name: str = ""                          # name, hint, item, kinds and default come from the field
    hint: Any = None
    item: Any = None                        # the type of an item, of a list
    kinds: tuple[Any, ...] = ()             # types of the values; empty if they have their own reader
    default: Any = None
    neutral: Any = _DEFAULT                 # the value without an effect
    doc: str                                # the effect, for the reference
    section: Section
    range: Range | None = None
    max_items: int | None = None            # the longest list
    max_chars: int = 0                      # the longest text, or the longest of a list
    min_chars: int = 1                      # the shortest, if there is a longest
    sampler: str | None = None              # the sampler that it turns on
    draws: bool = False                     # it affects draws only
    requires: str | None = None             # rejected without this parameter
    excludes: tuple[str, ...] = ()          # rejected with one of these
    unused_without: tuple[str, ...] = ()    # without all of these it has no effect, and is reported as unused
    common: bool = False                    # many requests have it: pages show it first
    own_field: bool = False                 # every dialect over HTTP declares it by itself
    one_text: bool = False                  # the dialects take one text for a list of it
    tgi: str | None = None                  # TGI's name, if it has another
    triton: str | None = None               # the input tensor of Triton's clients, if any
    generation_config: str | None = None    # the key of a model's default in generation_config.json

    @property
    def triton_type(self) -> tuple[str, int]:
        """The data type of the input tensor, as config.pbtxt has it, and its number of elements; -1: any."""
        if self.item is str:
            return "TYPE_STRING", -1
        if bool in self.kinds:
            return "TYPE_BOOL", 1
        if float in self.kinds:
            return "TYPE_FP32", 1
        unsigned = self.range is not None and self.range.high == 2**64 - 1
        return "TYPE_UINT64" if unsigned else "TYPE_INT32", 1


def param(doc: str, *, default: Any, section: Section, **rules: Any) -> Any:
    """Declare a field of `SamplingParams` and its row; `rules` are the other columns of `Param`.

    A `default` that is a dict is copied for each instance.
    """
    row = {"param": Param(doc=doc, section=section, **rules)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=row)
    return field(default=default, metadata=row)


@cache
def param_table(of: Any) -> Mapping[str, Param]:
    """Return the rows of the fields of a dataclass that `param` declares, by name and in their order."""
    hints, table = get_type_hints(of), {}
    for option in fields(of):
        row: Param | None = option.metadata.get("param")
        if row is None:
            continue
        default = option.default if option.default_factory is MISSING else option.default_factory()
        neutral = default if row.neutral is _DEFAULT else row.neutral
        hint = hints[option.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        table[option.name] = replace(
            row,
            name=option.name,
            hint=hint,
            item=get_args(hint)[0] if get_origin(hint) is tuple else None,
            kinds=kinds if any(map(_words, kinds)) else (),
            default=default,
            neutral=neutral,
        )
    return table


def validate(values: Iterable[Any], table: Mapping[str, Param]) -> tuple[str, ...]:
    """Validate the value of each parameter, its `requires` and `excludes`; return those not at their default.

    Raises:
        InvalidRequest: `field` is the name of the parameter.
    """
    changed: dict[str, Param] = {}
    for value, (name, row) in zip(values, table.items(), strict=True):
        if value is not row.default:    # a default needs no check
            _validate_value(value, row)
            if value != row.default:
                changed[name] = row
    for name, row in changed.items():
        if row.requires is not None:
            require(row.requires in changed, name, f"needs {row.requires}")
        for other in row.excludes:
            require(other not in changed, name, f"cannot be combined with {other}")
    return tuple(changed)


def _validate_value(value: Any, row: Param) -> None:
    name = row.name
    # The words are made only for an error: every request passes here.
    if row.kinds and not any(_is_of(value, kind) for kind in row.kinds):
        words = " or ".join(filter(None, map(_words, row.kinds)))
        raise InvalidRequest(f"{name} must be {words}", field=name)
    if row.range is not None and value is not None and value not in row.range:
        raise InvalidRequest(f"{name} must be {row.range}", field=name)
    if row.item is int:
        require(all(map(is_token_id, value)), name, "must be whole numbers, 0 or more")
    if row.max_items is not None:
        items = "ids" if row.item is int else "strings"
        require(len(value) <= row.max_items, name, f"takes at most {row.max_items} {items}")
    if row.max_chars:
        texts = {name: value} if row.item is None else {f"{name}[{i}]": text for i, text in enumerate(value)}
        for place, text in texts.items():
            holds = isinstance(text, str) and row.min_chars <= len(text) <= row.max_chars
            require(holds, place, f"must be a string of {row.min_chars} to {row.max_chars} characters")


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(kind))
    return _WORDS.get(kind, "")


def _is_of(value: object, kind: Any) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return is_number(value)
    if isinstance(kind, type):
        return isinstance(value, kind)
    return isinstance(value, str) and value in get_args(kind)   # of a Literal


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_token_id(value: object) -> bool:
    """Return whether a value can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
