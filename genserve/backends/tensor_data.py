"""Tensor data: the strings of BYTES tensors, and tensors in data files of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from genserve.errors import InferenceError, InvalidRequest, RepositoryError, Status
from genserve.files import read_regular_file
from genserve.tensor import DataType, Tensor

_MAX_FILE_BYTES = 2 << 30    # as the binary tensors of a request


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
        file: may be longer than the tensor, unless it holds strings.
        name: of the tensor.
        data_type: of the tensor.
        shape: of the tensor.
        too_short: returns the message for a file that is too short, from the expected and the actual number
            of bytes.

    Raises:
        RepositoryError: the file cannot be read, or is too short, or does not hold strings.
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
    except InvalidRequest as error:  # wrong strings
        raise RepositoryError(
            f"{file}: {error.message}",
            remedy="write the file with tritonclient.utils.serialize_byte_tensor: each element after its "
            "length in 4 bytes, little-endian",
        ) from error
