from __future__ import annotations

import json
import math

import numpy as np
import pytest

from genserve.errors import InferenceError, Status
from genserve.kserve.triton_parsing import (
    JsonKind,
    Members,
    checked,
    elements_of,
    leading_number,
    member,
    read_elements,
    read_json,
    read_pairs,
    texts_of,
)
from genserve.tensor import DataType, Tensor


def test_values_beyond_json_that_triton_accepts_are_parsed() -> None:
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
def test_syntax_errors_have_rapidjsons_messages(text: bytes, reason: str) -> None:
    with pytest.raises(InferenceError) as caught:
        read_json(text)
    assert caught.value.message == f"failed to parse the request JSON buffer: {reason}"
    assert caught.value.status is Status.INVALID_ARG


def test_nesting_that_would_exhaust_the_stack_is_rejected() -> None:
    for read in (read_json, read_pairs):
        with pytest.raises(InferenceError, match="JSON nesting depth exceeds"):
            read(b"[" * 100_000)


def test_members_keep_their_order_and_repeated_keys() -> None:
    assert read_pairs(b'{"b":1,"a":{"c":2},"b":[]}') == [("b", 1), ("a", [("c", 2)]), ("b", [])]
    assert isinstance(read_pairs(b"{}"), Members)
    assert not isinstance(read_pairs(b"[]"), Members)


def test_members_are_checked_for_their_kind() -> None:
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
def test_booleans_floats_and_negatives_are_not_unsigned_integers(value: object) -> None:
    with pytest.raises(InferenceError):
        checked(value, JsonKind.UNSIGNED)


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [1, [2, [3]], 4], [[[1], 2], [], [3, 4]]])
def test_nesting_of_elements_is_ignored(data: list[object]) -> None:
    assert read_elements("X", data, DataType.INT32).tolist() == [1, 2, 3, 4]


def test_integers_wrap_to_their_size() -> None:
    assert read_elements("X", [300, -129], DataType.INT8).tolist() == [44, 127]
    assert read_elements("X", [2**64 - 1], DataType.UINT64).tolist() == [2**64 - 1]


def test_too_large_numbers_become_infinite_without_a_warning() -> None:
    assert read_elements("X", [1e300], DataType.FP32).tolist() == [float("inf")]


@pytest.mark.parametrize(
    ("data", "data_type", "what"),
    [
        ([1, True], DataType.INT32, "non-signed-integer as signed-integer"),
        ([1.0], DataType.INT32, "non-signed-integer as signed-integer"),
        ([2**63], DataType.INT64, "non-signed-integer as signed-integer"),
        ([-1], DataType.UINT8, "non-unsigned-integer as unsigned-integer"),
        ([1, None], DataType.FP32, "non-number as double"),
        (["1"], DataType.FP64, "non-number as double"),
        ([1], DataType.BOOL, "non-boolean as boolean"),
        ([b"x"], DataType.BYTES, "non-string as string"),
        ([{}], DataType.BYTES, "non-string as string"),
    ],
)
def test_values_of_another_type_are_rejected(data: list[object], data_type: DataType, what: str) -> None:
    with pytest.raises(InferenceError, match=f"attempt to access JSON {what}"):
        read_elements("X", data, data_type)


def test_half_precision_is_rejected_in_json() -> None:
    with pytest.raises(InferenceError, match="receiving FP16 data via JSON is not supported"):
        read_elements("X", [1], DataType.FP16)
    with pytest.raises(InferenceError, match="sending BF16 data via JSON is not supported"):
        elements_of(Tensor("Y", np.zeros(1, np.uint16), data_type=DataType.BF16))


def test_nesting_beyond_the_limit_is_rejected() -> None:
    data: list[object] = [1]
    for _ in range(100):
        data = [data]
    with pytest.raises(InferenceError, match="JSON nesting depth"):
        read_elements("X", data, DataType.INT32)


def test_elements_are_flat_in_row_major_order() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert elements_of(Tensor("Y", array)).tolist() == [0, 3, 1, 4, 2, 5]


def test_invalid_utf_8_is_replaced() -> None:
    texts = texts_of(np.array([b"\xff\xfea", "\ud800", b"b\0"], dtype=object))
    assert texts == ["\ufffd\ufffda", "?", "b\0"]
    json.dumps(texts).encode()


@pytest.mark.parametrize(
    ("text", "number"), [("12", 12), (" \t+7x", 7), ("-3.5", -3), ("", None), ("x1", None), ("٣", None)]
)
def test_leading_number_parses_as_strtol(text: str, number: int | None) -> None:
    assert leading_number(text) == number


def test_leading_number_accepts_any_length() -> None:
    number = leading_number("9" * 5000)
    assert number is not None
    assert number > 2**64
