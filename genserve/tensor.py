"""Tensor: a named input or output of a model, and the data types of its elements."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.errors import InferenceError, InvalidRequest, RepositoryError, Status
from genserve.files import read_regular_file

_CPU = 1  # kDLCPU of dlpack.h
_MAX_FILE_BYTES = 2 << 30    # the same limit as for the binary tensors of a request


class DataType(Enum):
    """The data types of KServe v2.

    The name is the protocol's word (`FP32`, `BYTES`). The numbers are those of `inference.DataType` in
    Triton's schema, which are also pb_utils' `triton_dtype()`.

    Attributes:
        number: the number in the schema.
        numpy: the dtype of arrays with such elements: object for BYTES, each `bytes`; uint16 for BF16,
            which numpy lacks.
        itemsize: the bytes of one element on the wire; 0 for BYTES, whose elements begin with their length.
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
        """The name in config.pbtxt: `TYPE_FP32`; BYTES is `TYPE_STRING` there."""
        return "TYPE_STRING" if self is DataType.BYTES else f"TYPE_{self.name}"

    @classmethod
    def from_config_name(cls, name: str) -> DataType:
        """Return the type named `name` in config.pbtxt.

        Raises:
            KeyError: the name is unknown, or TYPE_INVALID.
        """
        return cls.BYTES if name == "TYPE_STRING" else cls[name.removeprefix("TYPE_")]

    @classmethod
    def of_numpy(cls, dtype: np.dtype[Any]) -> DataType:
        """Return the type of an array's elements; arrays of objects and of `S` strings are BYTES.

        Raises:
            KeyError: KServe has no such type (`<U`, complex, dates, big-endian numbers).
        """
        known = _OF_NUMPY.get(dtype)
        if known is not None:
            return known
        if dtype.kind == "S":
            return cls.BYTES
        raise KeyError(dtype)

    @property
    def elements(self) -> str:
        """A description of one element: `an integer from -128 to 127`."""
        match self.numpy.kind:
            case "b":
                return "true or false"
            case "O":
                return "a string"
            case "f":
                return f"a number from {np.finfo(self.numpy).min!s} to {np.finfo(self.numpy).max!s}"
            case _:
                return f"an integer from {np.iinfo(self.numpy).min} to {np.iinfo(self.numpy).max}"


_OF_NUMPY = {data_type.numpy: data_type for data_type in reversed(DataType)}


def narrowed(values: NDArray[Any], data_type: DataType, *, name: str, start: int = 0) -> NDArray[Any]:
    """Return numbers converted to the type of an input, which may be narrower.

    Args:
        values: an array of one dimension, integers or floats as the type requires. Infinities stay infinite.
        data_type: the type of the input.
        name: the name of the input, for the error.
        start: the index of the first number in the input.

    Raises:
        InferenceError: a number does not fit the type; the message has its index.
    """
    with np.errstate(over="ignore"):
        array = values.astype(data_type.numpy, copy=False)
    if array.dtype == values.dtype or not values.size:
        return array
    if array.dtype.kind == "f":
        is_wrong = np.isinf(array) & np.isfinite(values) if np.isinf(array).any() else np.False_
    else:
        limits = np.iinfo(array.dtype)
        fits = limits.min <= values.min() and values.max() <= limits.max
        is_wrong = np.False_ if fits else array != values
    if is_wrong.any():
        place = int(is_wrong.argmax())
        text = f"element {start + place} of input '{name}' is {values[place]}"
        raise InferenceError(
            f"{text}, which does not fit {data_type.name}",
            remedy=f"an element of {data_type.name} is {data_type.elements}",
        )
    return array


class Tensor:
    """A named array, on the CPU or on a device. Renaming and reshaping do not copy it.

    Attributes:
        name: the name of the input or output.
        data_type: the type of the elements.
        shape: the shape, with the batch dimension if the model has one.
    """

    __slots__ = ("_data", "data_type", "name", "shape")

    def __init__(self, name: str, data: Any, *, data_type: DataType | None = None) -> None:
        """Name an array.

        Args:
            name: the name of the input or output.
            data: a numpy array, C-contiguous; or, on a device, an object with `__dlpack__`,
                `__dlpack_device__` and `shape` (a torch tensor).
            data_type: the type of the elements; None: the array's own. BF16 data is uint16 to numpy.

        Raises:
            KeyError: KServe has no such data type.
        """
        self.name = name
        self.data_type = DataType.of_numpy(data.dtype) if data_type is None else data_type
        self.shape: tuple[int, ...] = tuple(data.shape)
        self._data = data

    @property
    def is_cpu(self) -> bool:
        """Whether the array is in the memory of the CPU."""
        return isinstance(self._data, np.ndarray) or self._data.__dlpack_device__()[0] == _CPU

    @property
    def array(self) -> NDArray[Any]:
        """The numpy array, which is a copy if the tensor is on a device."""
        if isinstance(self._data, np.ndarray):
            return self._data
        return _to_numpy(self._data, self.data_type)

    @property
    def data(self) -> Any:
        """The numpy array or the object with `__dlpack__` that the tensor was created from."""
        return self._data

    def on_cpu(self) -> Tensor:
        """Return the tensor in CPU memory, without a copy if it is there already."""
        return self if self.is_cpu else Tensor(self.name, self.array, data_type=self.data_type)

    def renamed(self, name: str) -> Tensor:
        """Return the same array under another name."""
        return self if name == self.name else Tensor(name, self._data, data_type=self.data_type)

    def reshaped(self, shape: Sequence[int]) -> Tensor:
        """Return the same elements in another shape."""
        return Tensor(self.name, self._data.reshape(tuple(shape)), data_type=self.data_type)

    def to_bytes(self) -> bytes | memoryview:
        """Return the elements in the format of KServe's binary extension.

        The elements are little-endian and row-major; a BYTES element is its length, uint32, and its bytes.
        """
        array = self.array
        if self.data_type is DataType.BYTES:
            return _join_strings(array)
        array = np.ascontiguousarray(array)
        return array.reshape(-1).view(np.uint8).data

    @classmethod
    def from_bytes(
        cls,
        name: str,
        buffer: bytes | bytearray | memoryview,
        *,
        data_type: DataType,
        shape: Sequence[int],
        model: str = "",
    ) -> Tensor:
        """Return the tensor in the result of `to_bytes`; elements of a fixed size are a view of `buffer`.

        Errors name the `model`, if given.

        Raises:
            InvalidRequest: the buffer does not have the length of the shape; `field` is the name.
        """
        count = math.prod(shape)
        where = f"input '{name}' for model '{model}'" if model else f"input '{name}'"
        if data_type is DataType.BYTES:
            array = _split_strings(name, buffer, count=count, where=where)
        else:
            expected = count * data_type.itemsize
            if len(buffer) != expected:
                raise InvalidRequest(
                    f"input byte size mismatch for {where}. Expected {expected}, got {len(buffer)}",
                    field=name,
                )
            array = np.frombuffer(buffer, dtype=data_type.numpy)
        return cls(name, array.reshape(tuple(shape)), data_type=data_type)


def _to_numpy(data: Any, data_type: DataType) -> NDArray[Any]:
    # Only torch makes such tensors, so it is imported already.
    import torch
    from torch.utils.dlpack import from_dlpack

    tensor = from_dlpack(data).cpu()
    if data_type is DataType.BF16:
        tensor = tensor.view(torch.uint16)

    array: NDArray[Any] = tensor.numpy()
    return array


def _join_strings(array: NDArray[Any]) -> bytes:
    parts: list[bytes] = []
    for element in array.reshape(-1).tolist():
        text = element if isinstance(element, bytes) else str(element).encode()
        parts += (struct.pack("<I", len(text)), text)
    return b"".join(parts)


def _split_strings(
    name: str, buffer: bytes | bytearray | memoryview, *, count: int, where: str
) -> NDArray[Any]:
    view = memoryview(buffer)
    elements: list[bytes] = []
    position = 0
    while position < len(view):
        rest = len(view) - position
        if rest < 4:
            raise _bad_strings(
                name,
                f"incomplete string length indicator for inference {where}, expecting 4 bytes but only "
                f"{rest} bytes available. Please make sure the string length indicator is in one buffer.",
            )
        (length,) = struct.unpack_from("<I", view, position)
        position += 4
        if position + length > len(view):
            raise _bad_strings(
                name,
                f"incomplete string data for inference input '{name}', expecting string of length {length} "
                f"but only {rest - 4} bytes available",
            )
        elements.append(bytes(view[position : position + length]))
        position += length
    if len(elements) != count:
        raise _bad_strings(name, _wrong_count(len(elements), count=count, where=where))
    array = np.empty(count, dtype=object)
    array[:] = elements
    return array


def _wrong_count(got: int, *, count: int, where: str) -> str:
    if got < count:
        return f"expected {count} string elements for inference {where}, got {got}"
    return f"unexpected number of string elements {got} for inference {where}, expecting {count}"


def _bad_strings(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(
        message, field=name, remedy="write each element as its length, 4 bytes little-endian, and its bytes"
    )


def shape_text(shape: Iterable[int]) -> str:
    """Return a shape as Triton writes it: `[-1,3]`."""
    return f"[{','.join(map(str, shape))}]"


def fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether a shape has the sizes of `dims`, where -1 matches any size."""
    if len(shape) != len(dims):
        return False
    for size, dim in zip(shape, dims, strict=True):  # noqa: SIM110 - of every request: twice as fast
        if dim not in (-1, size):
            return False
    return True


def compatible(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether some shape matches both arguments, in which -1 matches any size."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def reshape(shape: Sequence[int], *, dims: Sequence[int], to: Sequence[int]) -> tuple[int, ...]:
    """Return `to` with each -1 replaced, in order, by the size in `shape` where `dims` has a -1.

    A -1 in `to` remains if `dims` has fewer.
    """
    sizes = iter([size for size, dim in zip(shape, dims, strict=False) if dim == -1])
    return tuple(next(sizes, -1) if dim == -1 else dim for dim in to)



def decode_strings(tensor: Tensor) -> list[str]:
    """Return the elements of a BYTES tensor, row-major, as str.

    Raises:
        InferenceError: an element is not UTF-8.
    """
    try:
        return [
            element.decode() if isinstance(element, bytes) else str(element)
            for element in tensor.array.reshape(-1).tolist()
        ]
    except UnicodeDecodeError as error:
        raise InferenceError(
            f"inference input '{tensor.name}' has an element that is not UTF-8: {error}",
            field=tensor.name,
            remedy="the model takes text; send other bytes as UINT8",
        ) from error


def string_tensor(name: str, elements: Iterable[str], *, shape: Sequence[int]) -> Tensor:
    """Return a BYTES tensor with the given strings in row-major order."""
    encoded = [element.encode() for element in elements]
    array = np.empty(len(encoded), dtype=object)
    array[:] = encoded
    return Tensor(name, array.reshape(tuple(shape)), data_type=DataType.BYTES)


def read_tensor(
    file: Path, name: str, *, data_type: DataType, shape: Sequence[int], too_short: Callable[[int, int], str]
) -> Tensor:
    """Read a tensor from a file: elements row-major, strings each after their length (uint32).

    Args:
        file: the file, which may be longer than the tensor unless it has strings.
        name: the name of the input or output.
        data_type: the type of the elements.
        shape: the shape of the tensor.
        too_short: returns the message for a file that is too short, from the expected and the actual number
            of bytes.

    Raises:
        RepositoryError: the file cannot be read, is too short, or has invalid strings.
    """
    try:
        content = read_regular_file(file, max_bytes=_MAX_FILE_BYTES)
    except OSError as error:
        raise RepositoryError(
            f"failed to open text file for read {file}: {error.strerror}",
            status=Status.INTERNAL,
            remedy=f"put the file into {file.parent}, or correct its name in config.pbtxt",
        ) from error
    if data_type is not DataType.BYTES:
        num_bytes = math.prod(shape) * data_type.itemsize
        if len(content) < num_bytes:
            raise RepositoryError(
                too_short(num_bytes, len(content)),
                remedy=f"{file} must hold {data_type.name} elements of shape {list(shape)}, row-major",
            )
        content = content[:num_bytes]
    try:
        return Tensor.from_bytes(name, content, data_type=data_type, shape=tuple(shape))
    except InvalidRequest as error:  # the strings are invalid
        raise RepositoryError(
            f"{file}: {error.message}",
            remedy="write the file with tritonclient.utils.serialize_byte_tensor: each element after its "
            "length in 4 bytes, little-endian",
        ) from error
