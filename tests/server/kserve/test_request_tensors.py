from __future__ import annotations

import numpy as np
import pytest

from genserve.errors import InferenceError
from genserve.server.kserve.request_tensors import classify
from genserve.tensor import Tensor


def classes(array: np.ndarray, *, count: int, labels: tuple[str, ...] = (), batched: bool = True) -> object:
    return classify(Tensor("Y", array), count=count, labels=labels, batched=batched).array.tolist()


def test_classes_are_sorted_with_index_and_label() -> None:
    rows = np.array([[1, 3, 2], [9, 7, 8]], np.float32)
    assert classes(rows, count=2, labels=("cat", "dog")) == [
        [b"3.000000:1:dog", b"2.000000:2"],
        [b"9.000000:0:cat", b"8.000000:2"],
    ]


def test_equal_values_keep_the_order_of_their_classes() -> None:
    assert classes(np.array([[1, 1, 1, 2]], np.int64), count=3) == [[b"2:3", b"1:0", b"1:1"]]


def test_unsigned_and_extreme_integers_are_sorted_as_numbers() -> None:
    assert classes(np.array([[0, 2**64 - 1]], np.uint64), count=1) == [[b"18446744073709551615:1"]]
    assert classes(np.array([[127, -128]], np.int8), count=2) == [[b"127:0", b"-128:1"]]


def test_a_count_beyond_the_classes_returns_all() -> None:
    assert classes(np.array([0.5, 1e10], np.float64), count=9, batched=False) == [
        b"10000000000.000000:1",
        b"0.500000:0",
    ]


def test_all_dimensions_after_the_batch_form_one_row() -> None:
    assert classes(np.arange(4, dtype=np.int32).reshape(1, 2, 2), count=1) == [[b"3:3"]]


def test_an_empty_row_has_no_classes() -> None:
    assert classes(np.zeros((2, 0), np.float32), count=3) == [[], []]


@pytest.mark.parametrize("array", [np.zeros(2, np.bool_), np.zeros(2, np.float16), np.array([b"x"], object)])
def test_types_other_than_numbers_cannot_be_classified(array: np.ndarray) -> None:
    with pytest.raises(InferenceError, match="class result not available for output due to unsupported type"):
        classes(array, count=1)


def test_a_row_of_more_than_a_million_elements_is_not_classified() -> None:
    with pytest.raises(InferenceError, match="classification output tensor too large"):
        classes(np.zeros((1, 1_000_001), np.int8), count=1)
