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
def test_arrays_have_the_types_of_the_protocol(dtype, data_type):
    assert DataType.of_numpy(np.dtype(dtype)) is DataType[data_type]


@pytest.mark.parametrize("dtype", ["U3", "c8", "M8[s]", ">f4", ">i8"])
def test_what_the_protocol_does_not_have_is_refused_and_so_is_the_other_byte_order(dtype):
    with pytest.raises(KeyError):
        DataType.of_numpy(np.dtype(dtype))
