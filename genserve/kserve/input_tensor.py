"""Input tensor: bytes from the wire as a tensor, or the literal error."""

from __future__ import annotations

import math
from collections.abc import Sequence

from genserve.config.model_config import ModelConfig
from genserve.data_type import DataType
from genserve.errors import InferenceError, InvalidRequest
from genserve.inference import with_request_id
from genserve.tensor import Tensor

__all__ = ["check_shape", "check_size", "fail", "input_tensor", "read_data_type"]

# Of numpy; sizes beside a 0 count too.
_MAX_RANK = 64
_MAX_ELEMENTS = 2**59


def fail(message: str, *, request_id: str) -> InferenceError:
    """Return the error for a request that does not fit, in Triton's form, which begins with the request."""
    return InferenceError(with_request_id(message, request_id))


def read_data_type(word: str, *, name: str, config: ModelConfig, request_id: str) -> DataType:
    """Return the data type that the protocol calls `word`.

    Raises:
        InferenceError: there is none, or the model has no such input.
    """
    try:
        return DataType[word]
    except KeyError:
        _check_expected(name, "<invalid>", config=config, request_id=request_id)
        raise AssertionError from None


def input_tensor(
    name: str,
    data: bytes | memoryview,
    *,
    data_type: DataType,
    shape: Sequence[int],
    config: ModelConfig,
    request_id: str,
) -> Tensor:
    """Return the tensor that `data` holds in the binary form; elements of fixed size are a view of it.

    Raises:
        InferenceError: the sizes do not agree.
    """
    check_shape(name, shape, config=config, request_id=request_id)
    expected = math.prod(shape) * data_type.itemsize
    if data_type is not DataType.BYTES and len(data) != expected:
        _check_expected(name, data_type.name, config=config, request_id=request_id)
        raise fail(
            f"input byte size mismatch for input '{name}' for model '{config.name}'. "
            f"Expected {expected}, got {len(data)}",
            request_id=request_id,
        )
    try:
        return Tensor.from_bytes(name, data, data_type=data_type, shape=shape, model=config.name)
    except InvalidRequest as error:
        if "for model" not in error.message:  # Triton finds this one before it looks at the model
            raise InferenceError(error.message) from error
        raise fail(error.message, request_id=request_id) from error


def check_shape(name: str, shape: Sequence[int], *, config: ModelConfig, request_id: str) -> None:
    """Refuse a shape that leaves a dimension open, or that no array can have.

    Raises:
        InferenceError: it does.
    """
    check_size(name, shape, config=config, request_id=request_id)
    if shape and min(shape) < 0:
        raise fail(
            f"All input dimensions should be specified for input '{name}' for model '{config.name}', "
            f"got [{','.join(map(str, shape))}]",
            request_id=request_id,
        )


def check_size(name: str, shape: Sequence[int], *, config: ModelConfig, request_id: str) -> None:
    """Refuse a shape that no array can have, however few elements it has.

    Raises:
        InferenceError: it is such.
    """
    if len(shape) > _MAX_RANK or abs(math.prod(size for size in shape if size)) > _MAX_ELEMENTS:
        message = f"no array has the shape of input '{name}' for model '{config.name}'"
        raise fail(message, request_id=request_id)


def _check_expected(name: str, word: str, *, config: ModelConfig, request_id: str) -> None:
    spec = config.input(name)
    if spec is None:
        raise InferenceError(f"unexpected inference input '{name}' for model '{config.name}'")
    expected = DataType.from_config_name(spec.data_type).name
    if word != expected:
        raise fail(
            f"inference input '{name}' data-type is '{word}', but model '{config.name}' expects '{expected}'",
            request_id=request_id,
        )
