"""The table of sampling parameters: ranges and their texts, and rows that need or exclude each other."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import pytest

from genserve.errors import InvalidRequest
from genserve.sampling.param_table import Param, Range, param, param_table, validate
from genserve.sampling.sampling_params import PARAMETERS


@dataclass(frozen=True, kw_only=True)
class Oven:
    heat: float = param("", default=0.0, section="draw", range=Range(0, 300, "off"))
    fan: bool = param("", default=False, section="draw", requires="heat")
    steam: int = param("", default=0, section="draw", excludes=("fan",))
    tins: tuple[str, ...] = param("", default=(), section="draw", max_items=2, max_chars=3)


@pytest.mark.parametrize(
    ("allowed", "text", "inside", "outside"),
    [
        (Range(0, 1, "off"), "between 0 (off) and 1", [0, 1], [-0.1, 1.1, math.nan]),
        (Range(0, 1, above=True), "above 0 and at most 1", [1e-9, 1], [0, math.nan]),
        (Range(0, 1, "off", below=True), "at least 0 (off) and below 1", [0], [1, math.nan]),
        (Range(1), "at least 1", [1, 10**12], [0]),
        (Range(1, 9, extra=-1, extra_means="all"), "-1 (all), or between 1 and 9", [-1, 1], [0, 10]),
        (Range(0, 2**31 - 1), "between 0 and 2^31 - 1", [5], [2**31]),
        (Range(-(2**31), 2**64 - 1), "between -2^31 and 2^64 - 1", [2**64 - 1], [2**64]),
    ],
)
def test_a_range_contains_its_numbers_and_describes_them(allowed, text, inside, outside):
    assert str(allowed) == text
    assert [x for x in inside + outside if x in allowed] == inside


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heat": "hot"}, "heat must be a number"),
        ({"heat": 400}, "heat must be between 0 (off) and 300"),
        ({"fan": True}, "fan needs heat"),
        ({"heat": 1, "fan": True, "steam": 1}, "steam cannot be combined with fan"),
        ({"tins": ("a", "b", "c")}, "tins takes at most 2 strings"),
        ({"tins": ("a", "")}, "tins[1] must be a string of 1 to 3 characters"),
    ],
)
def test_a_row_rejects_values_with_a_message(values, message):
    with pytest.raises(InvalidRequest) as rejected:
        validate(astuple(Oven(**values)), param_table(Oven))
    assert str(rejected.value) == message


def test_a_row_accepts_its_default_with_the_parameter_it_requires():
    validate(astuple(Oven()), param_table(Oven))
    validate(astuple(Oven(heat=200, fan=True, tins=("a",))), param_table(Oven))


@pytest.mark.parametrize("row", PARAMETERS.values(), ids=list(PARAMETERS))
def test_the_names_in_a_row_are_parameters(row: Param):
    others = [*row.excludes, *row.unused_without, row.requires or row.name]
    assert PARAMETERS.keys() >= set(others)
