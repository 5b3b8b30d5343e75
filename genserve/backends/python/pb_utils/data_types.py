"""Data types: between the words and numbers of the config, and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from genserve.data_type import DataType

__all__ = [
    "TRITON_STRING_TO_NUMPY",
    "numpy_to_triton_type",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
]

# BF16 is missing, as in Triton: numpy has no such type.
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    data_type.config_name: data_type.numpy.type for data_type in DataType if data_type is not DataType.BF16
} | {"TYPE_BOOL": bool}


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type of config.pbtxt's word: TYPE_FP32 is float32, TYPE_STRING is object.

    Raises:
        KeyError: no such word, or TYPE_BF16, which numpy does not have.
    """
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type of a number of `Tensor.triton_dtype`; None: it has none."""
    return next((one.numpy.type for one in DataType if one.number == data_type and one.name != "BF16"), None)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the number of a numpy type; None: the protocol has no such type."""
    try:
        return DataType.of_numpy(np.dtype(data_type)).number
    except KeyError:
        return None
