"""Amounts of memory in parameters."""

from __future__ import annotations

import pytest

from genserve.machine import byte_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1048576", 2**20),
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("1.5 GB", 1_500_000_000),
        ("64KiB", 2**16),
        ("0", 0),
    ],
)
def test_an_amount_of_memory_is_read_with_its_unit(text: str, num_bytes: int) -> None:
    assert byte_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 G i B", "2TiB", "1e9", "two", "9" * 400])
def test_a_text_that_is_no_amount_gives_none(text: str) -> None:
    assert byte_size(text) is None
