from __future__ import annotations

import math

import pytest

from genserve.errors import InferenceError, Status
from genserve.kserve.triton_parsing import JsonKind, Members, checked, member, read_json, read_pairs


def test_what_json_lacks_and_triton_takes_is_read() -> None:
    values = read_json(b'[NaN, Infinity, -Infinity, 18446744073709551615]')
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 2**64 - 1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "The document is empty. at 0"),
        (b"hello", "Invalid value. at 0"),
        (b'{"inputs":[', "Invalid value. at 11"),
        (b'{"a":1e400}', "Number too big to be stored in double. at 5"),
        (b'{"a":1} x', "The document root must not be followed by other values. at 8"),
        (b'"\xff"', "Invalid encoding in string. at 1"),
    ],
)
def test_broken_text_is_told_as_rapidjson_tells_it(text: bytes, reason: str) -> None:
    with pytest.raises(InferenceError) as caught:
        read_json(text)
    assert caught.value.message == f"failed to parse the request JSON buffer: {reason}"
    assert caught.value.status is Status.INTERNAL


def test_a_nesting_that_would_exhaust_the_stack_is_refused() -> None:
    for read in (read_json, read_pairs):
        with pytest.raises(InferenceError, match="JSON nesting depth exceeds"):
            read(b"[" * 100_000)


def test_pairs_keep_their_order_and_what_is_given_twice() -> None:
    assert read_pairs(b'{"b":1,"a":{"c":2},"b":[]}') == [("b", 1), ("a", [("c", 2)]), ("b", [])]
    assert isinstance(read_pairs(b"{}"), Members)
    assert not isinstance(read_pairs(b"[]"), Members)


def test_members_are_of_their_kind() -> None:
    assert member({"name": "X"}, "name", JsonKind.STRING) == "X"
    for owner, reason in (
        ({"name": 5}, "attempt to access JSON non-string as string"),
        ({}, "attempt to access non-existing object member 'name'"),
        ([], "attempt to access non-existing object member 'name'"),
    ):
        with pytest.raises(InferenceError) as caught:
            member(owner, "name", JsonKind.STRING)
        assert caught.value.message == f"Unable to parse 'name': {reason}"


@pytest.mark.parametrize("value", [True, 1.0, -1, 2**64, None, "1"])
def test_an_unsigned_integer_is_nothing_else(value: object) -> None:
    with pytest.raises(InferenceError):
        checked(value, JsonKind.UNSIGNED)
