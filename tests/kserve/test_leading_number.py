from __future__ import annotations

import pytest

from genserve.kserve.triton_parsing import leading_number


@pytest.mark.parametrize(
    ("text", "number"), [("12", 12), (" \t+7x", 7), ("-3.5", -3), ("", None), ("x1", None), ("٣", None)]
)
def test_it_is_what_strtol_reads(text: str, number: int | None) -> None:
    assert leading_number(text) == number


def test_a_number_of_any_length_is_read() -> None:
    number = leading_number("9" * 5000)
    assert number is not None
    assert number > 2**64
