from __future__ import annotations

import numpy as np
import pytest

from genserve.tensor import DataType


@pytest.mark.parametrize(
    ("dtype", "data_type"),
    [
        ("f4", "FP32"),
        ("q", "INT64"),
        ("l", "INT64"),
        ("u2", "UINT16"),
        ("?", "BOOL"),
        ("O", "BYTES"),
        ("S3", "BYTES"),
    ],
)
def test_arrays_have_the_data_types_of_kserve(dtype, data_type):
    assert DataType.of_numpy(np.dtype(dtype)) is DataType[data_type]


@pytest.mark.parametrize("dtype", ["U3", "c8", "M8[s]", ">f4", ">i8"])
def test_other_data_types_and_byte_orders_are_rejected(dtype):
    with pytest.raises(KeyError):
        DataType.of_numpy(np.dtype(dtype))
