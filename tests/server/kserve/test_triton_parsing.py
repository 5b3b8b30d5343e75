from __future__ import annotations

import json
import math

import numpy as np
import pytest

from genserve.errors import InferenceError, Status
from genserve.server.kserve.triton_parsing import (
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


@pytest.mark.parametrize("data_type", [one for one in DataType if "INT" in one.name])
def test_an_integer_beyond_its_type_is_rejected_with_its_place(data_type: DataType) -> None:
    limits = np.iinfo(data_type.numpy)
    ends = [int(limits.min), int(limits.max)]
    assert read_elements("X", ends, data_type).tolist() == ends
    for beyond in (limits.min - 1, limits.max + 1):
        with pytest.raises(InferenceError) as caught:
            read_elements("X", [[0, 1], [beyond]], data_type, start=100)
        assert "element 102 of input 'X'" in str(caught.value)
        assert f"an integer from {limits.min} to {limits.max}" in caught.value.remedy


@pytest.mark.parametrize("number", [1e39, -3.5e38, 10**19 * 10**20])
def test_a_number_beyond_fp32_is_rejected_with_its_place(number: float) -> None:
    with pytest.raises(InferenceError, match="element 1 of input 'X' is") as caught:
        read_elements("X", [0, number, 0], DataType.FP32)
    assert "from -3.4028235e+38 to 3.4028235e+38" in caught.value.remedy


def test_infinities_and_nan_stay_what_they_are() -> None:
    given = read_json(b"[NaN, Infinity, -Infinity, 3.4028235e38, 1e-300]")
    for data_type in (DataType.FP32, DataType.FP64):
        nan, *others, small = read_elements("X", given, data_type).tolist()
        assert math.isnan(nan)
        assert others == [math.inf, -math.inf, pytest.approx(3.4028235e38)]
        assert small == (0 if data_type is DataType.FP32 else 1e-300)
    with pytest.raises(InferenceError, match=r"element 5 .* 1e\+39"):
        read_elements("X", [*given, 1e39], DataType.FP32)


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
