"""Data type: what the elements of a tensor are, in the words of the protocol, the config and numpy."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

__all__ = ["DataType"]


class DataType(Enum):
    """The data types of KServe v2.

    The name is the protocol's word (`FP32`, `BYTES`). The numbers are those of `inference.DataType` in
    Triton's schema, which are also pb_utils' `triton_dtype()`.

    Attributes:
        number: in the schema.
        numpy: how an array holds the elements: BYTES as objects, each `bytes`; BF16 as its raw uint16,
            since numpy has no such type.
        itemsize: bytes of one element on the wire; 0 for BYTES, whose elements say their own length.
    """

    BOOL = (1, "?")
    UINT8 = (2, "u1")
    UINT16 = (3, "<u2")
    UINT32 = (4, "<u4")
    UINT64 = (5, "<u8")
    INT8 = (6, "i1")
    INT16 = (7, "<i2")
    INT32 = (8, "<i4")
    INT64 = (9, "<i8")
    FP16 = (10, "<f2")
    FP32 = (11, "<f4")
    FP64 = (12, "<f8")
    BYTES = (13, "O")
    BF16 = (14, "<u2")

    def __init__(self, number: int, numpy: str) -> None:
        self.number = number
        self.numpy = np.dtype(numpy)
        self.itemsize = 0 if self.numpy.hasobject else self.numpy.itemsize

    @property
    def config_name(self) -> str:
        """The word of config.pbtxt: `TYPE_FP32`; BYTES is `TYPE_STRING` there."""
        return "TYPE_STRING" if self is DataType.BYTES else f"TYPE_{self.name}"

    @classmethod
    def from_config_name(cls, name: str) -> DataType:
        """Return the type that config.pbtxt calls `name`.

        Raises:
            KeyError: there is none, or it is TYPE_INVALID.
        """
        return cls.BYTES if name == "TYPE_STRING" else cls[name.removeprefix("TYPE_")]

    @classmethod
    def of_numpy(cls, dtype: np.dtype[Any]) -> DataType:
        """Return the type of the elements of an array; arrays of objects and of `S` strings are BYTES.

        Raises:
            KeyError: the protocol has no such type (`<U`, complex, dates, big-endian numbers).
        """
        known = _OF_NUMPY.get(dtype)
        if known is not None:
            return known
        if dtype.kind == "S":
            return cls.BYTES
        raise KeyError(dtype)


_OF_NUMPY = {data_type.numpy: data_type for data_type in reversed(DataType)}
