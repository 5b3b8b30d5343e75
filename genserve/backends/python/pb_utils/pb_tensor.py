"""Tensors of a model.py: named arrays, their data types, strings as bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve import tensor as inner
from genserve.backends.libraries import import_torch
from genserve.backends.python.pb_utils.pb_error import TritonModelException, text_argument
from genserve.tensor import DataType

_CPU, _CUDA, _CUDA_HOST = 1, 2, 3  # DLDeviceType of dlpack.h

_BY_TORCH_NAME = {
    f"torch.{data_type.numpy}": data_type for data_type in DataType if data_type is not DataType.BF16
} | {"torch.bfloat16": DataType.BF16}

# BF16 is missing, as in Triton: numpy has no such type.
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    data_type.config_name: data_type.numpy.type for data_type in DataType if data_type is not DataType.BF16
} | {"TYPE_BOOL": bool}


class Tensor:
    """A named array, passed by pointer to the target of a BLS request and back.

    Writes into an array are visible to all models that have it.
    """

    __slots__ = ("_given", "_wrapped")

    def __init__(self, name: str | bytes, numpy_array: NDArray[Any]) -> None:
        """Make a tensor of a numpy array; the elements of a string array are `bytes` or `str`.

        Raises:
            TritonModelException: the name is empty, or the protocol does not have the dtype.
        """
        name = _read_name(name)
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor(name: str, numpy_array: numpy.ndarray), got {type(numpy_array)}")
        try:
            data_type = DataType.of_numpy(numpy_array.dtype)
        except KeyError:
            raise TritonModelException("NumPy dtype is not supported.") from None
        self._given = numpy_array if data_type is DataType.BYTES else None
        self._wrapped = inner.Tensor(name, _as_held(numpy_array, data_type), data_type=data_type)

    @classmethod
    def _of(cls, wrapped: inner.Tensor) -> Tensor:
        self = cls.__new__(cls)
        self._given = None
        self._wrapped = wrapped
        return self

    def name(self) -> str:
        """Return the name of the input or output."""
        return self._wrapped.name

    def shape(self) -> list[int]:
        """Return the shape."""
        return list(self._wrapped.shape)

    def triton_dtype(self) -> int:
        """Return the number of the data type in Triton's enum."""
        return self._wrapped.data_type.number

    def is_cpu(self) -> bool:
        """Whether it is in CPU memory."""
        return self._wrapped.is_cpu

    def as_numpy(self) -> NDArray[Any]:
        """Return the array, writable and not copied; the elements of a string tensor are `bytes`.

        Raises:
            TritonModelException: it is on a GPU or of BF16, which numpy does not have.
        """
        if self._given is not None:
            return self._given
        if not self._wrapped.is_cpu:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if self._wrapped.data_type is DataType.BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() "
                "instead."
            )
        array = self._writable()
        return array.view(StringArray) if self._wrapped.data_type is DataType.BYTES else array

    def _writable(self) -> NDArray[Any]:
        array = self._wrapped.array
        if not array.flags.writeable:  # the body of a request; models may modify their inputs
            array = array.copy()
            self._wrapped = inner.Tensor(self._wrapped.name, array, data_type=self._wrapped.data_type)
        return array

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule of the same memory.

        Raises:
            TritonModelException: it is a string tensor.
        """
        return self.__dlpack__()

    def __dlpack__(self, stream: Any = None, **options: Any) -> Any:
        if stream is not None:
            options["stream"] = stream
        return self._exporter().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        data = self._wrapped.data
        return (_CPU, 0) if isinstance(data, np.ndarray) else tuple(data.__dlpack_device__())

    def _exporter(self) -> Any:
        data, data_type = self._wrapped.data, self._wrapped.data_type
        if data_type is DataType.BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        if not isinstance(data, np.ndarray):
            return data
        array = self._writable()
        if data_type is not DataType.BF16:
            return array
        torch = import_torch("a tensor in bfloat16, which numpy does not have,")
        return torch.from_numpy(array).view(torch.bfloat16)

    @staticmethod
    def from_dlpack(name: str | bytes, tensor: Any) -> Tensor:
        """Make a tensor of an array of another library, sharing its memory.

        Args:
            name: the tensor's name.
            tensor: a DLPack capsule, or an object with `__dlpack__` and `__dlpack_device__`.

        Raises:
            TritonModelException: the name is empty, or the object is not such an array or not contiguous.
        """
        name = _read_name(name)
        if isinstance(tensor, Tensor):
            return Tensor._of(tensor._wrapped.renamed(name))
        return Tensor._of(_imported(name, tensor))


def _read_name(name: str | bytes) -> str:
    name = text_argument(name, "the name of a Tensor")
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return name


def _as_held(array: NDArray[Any], data_type: DataType) -> NDArray[Any]:
    """Return an array in the form of tensors: contiguous, strings as `bytes` objects."""
    if data_type is DataType.BYTES:
        return _of_bytes(array)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _of_bytes(array: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(array)  # not a StringArray
    elements = array.reshape(-1).tolist()
    if array.dtype.hasobject and array.flags.c_contiguous and all(isinstance(e, bytes) for e in elements):
        return array
    held = np.empty(len(elements), dtype=object)
    held[:] = [element if isinstance(element, bytes) else str(element).encode() for element in elements]
    return held.reshape(array.shape)


def _imported(name: str, tensor: Any) -> inner.Tensor:
    if type(tensor).__name__ == "PyCapsule":
        return _of_torch(name, _torch_from_dlpack(tensor))  # numpy imports capsules read-only
    if not hasattr(tensor, "__dlpack__") or not hasattr(tensor, "__dlpack_device__"):
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule         or have `__dlpack__` "
            "and `__dlpack_device__` attributes"
        )
    device = int(tensor.__dlpack_device__()[0])
    if device not in (_CPU, _CUDA, _CUDA_HOST):
        raise TritonModelException(f"DLDevice type {device} is not support by Python backend.")
    if isinstance(tensor, np.ndarray) and not tensor.dtype.hasobject:
        return _of_numpy(name, tensor)
    return _of_torch(name, _torch_from_dlpack(tensor))


def _torch_from_dlpack(tensor: Any) -> Any:
    return import_torch("Tensor.from_dlpack").from_dlpack(tensor)


def _of_numpy(name: str, array: NDArray[Any]) -> inner.Tensor:
    _check_contiguous(contiguous=array.flags.c_contiguous)
    try:
        return inner.Tensor(name, array)
    except KeyError:
        raise TritonModelException("Unsupported triton dtype.") from None


def _of_torch(name: str, tensor: Any) -> inner.Tensor:
    _check_contiguous(contiguous=tensor.is_contiguous())
    data_type = _BY_TORCH_NAME.get(str(tensor.dtype))
    if data_type is None:
        raise TritonModelException("Unsupported triton dtype.")
    keeps = data_type is DataType.BF16 or tensor.device.type != "cpu"
    return inner.Tensor(name, tensor if keeps else tensor.numpy(), data_type=data_type)


def _check_contiguous(*, contiguous: bool) -> None:
    if not contiguous:
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are "
            "supported."
        )


class StringArray(np.ndarray[Any, np.dtype[np.object_]]):
    """An array of `bytes` objects that the functions of `np.char` also accept.

    Old releases of Triton passed arrays of dtype `S`, and old models call `np.char.decode` on them, which
    rejects arrays of objects. Newer releases pass objects, since `S` drops trailing NUL bytes.
    """

    def __array_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if func.__module__ not in ("numpy.char", "numpy.strings"):
            return super().__array_function__(func, types, args, kwargs)
        return func(*(_as_strings(arg) for arg in args), **kwargs)


def _as_strings(value: object) -> object:
    return np.asarray(value).astype("S") if isinstance(value, StringArray) else value


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type of a data type of config.pbtxt: TYPE_FP32 is float32, TYPE_STRING is object.

    Raises:
        KeyError: it is unknown, or TYPE_BF16, which numpy does not have.
    """
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type of a `Tensor.triton_dtype`; None: numpy has no such type."""
    return next((one.numpy.type for one in DataType if one.number == data_type and one.name != "BF16"), None)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the `Tensor.triton_dtype` of a numpy type; None: the protocol has no such type."""
    try:
        return DataType.of_numpy(np.dtype(data_type)).number
    except KeyError:
        return None


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> bytes | tuple[()] | None:
    """Return the elements of an array of `bytes` or `str`, row-major, each after its length (uint32).

    Returns:
        `()` for an empty array, None for one that does not hold strings.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return bytes(inner.Tensor("", input_tensor, data_type=DataType.BYTES).to_bytes())


def deserialize_bytes_tensor(encoded_tensor: bytes) -> NDArray[Any]:
    """Return the elements of a buffer of `serialize_byte_tensor`: [n] `bytes` objects."""
    elements: list[bytes] = []
    position = 0
    while position < len(encoded_tensor):
        start = position + 4
        position = start + int.from_bytes(encoded_tensor[position:start], "little")
        elements.append(bytes(encoded_tensor[start:position]))
    return np.array(elements, dtype=np.object_)
