from __future__ import annotations

import json

import numpy as np
import pytest

from genserve.errors import InferenceError
from genserve.kserve.triton_parsing import elements_of, read_elements, texts_of
from genserve.tensor import DataType, Tensor


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [1, [2, [3]], 4], [[[1], 2], [], [3, 4]]])
def test_nesting_does_not_count(data: list[object]) -> None:
    assert read_elements("X", data, DataType.INT32).tolist() == [1, 2, 3, 4]


def test_integers_wrap_to_their_size() -> None:
    assert read_elements("X", [300, -129], DataType.INT8).tolist() == [44, 127]
    assert read_elements("X", [2**64 - 1], DataType.UINT64).tolist() == [2**64 - 1]


def test_too_large_numbers_are_infinite_and_no_warning() -> None:
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
def test_values_of_another_kind_are_refused(data: list[object], data_type: DataType, what: str) -> None:
    with pytest.raises(InferenceError, match=f"attempt to access JSON {what}"):
        read_elements("X", data, data_type)


def test_half_precision_has_no_json() -> None:
    with pytest.raises(InferenceError, match="receiving FP16 data via JSON is not supported"):
        read_elements("X", [1], DataType.FP16)
    with pytest.raises(InferenceError, match="sending BF16 data via JSON is not supported"):
        elements_of(Tensor("Y", np.zeros(1, np.uint16), data_type=DataType.BF16))


def test_a_nesting_beyond_the_limit_is_refused() -> None:
    data: list[object] = [1]
    for _ in range(100):
        data = [data]
    with pytest.raises(InferenceError, match="JSON nesting depth"):
        read_elements("X", data, DataType.INT32)


def test_elements_come_flat_and_row_by_row_whatever_the_memory() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert elements_of(Tensor("Y", array)).tolist() == [0, 3, 1, 4, 2, 5]


def test_bytes_that_are_no_text_are_replaced() -> None:
    texts = texts_of(np.array([b"\xff\xfea", "\ud800", b"b\0"], dtype=object))
    assert texts == ["\ufffd\ufffda", "?", "b\0"]
    json.dumps(texts).encode()
