"""Request tensors: inputs from the bytes of a request, and outputs in the requested form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from genserve.config.model_config import ModelConfig
from genserve.errors import InferenceError, InvalidRequest
from genserve.inference import with_request_id
from genserve.repository.model_versions import ModelVersion
from genserve.server.kserve.shared_memory import RegionPart
from genserve.tensor import DataType, Tensor, shape_text

# Limits of numpy, which ignore dimensions of size 0.
_MAX_RANK = 64
_MAX_ELEMENTS = 2**59
_MAX_CLASSES = 1_000_000    # that a row may have: they are sorted and formatted
_UNSUPPORTED = frozenset({DataType.BOOL, DataType.FP16, DataType.BF16, DataType.BYTES})


def fail(message: str, *, request_id: str) -> InferenceError:
    """Return the error for an invalid request, whose message begins with the request id, as Triton's."""
    return InferenceError(with_request_id(message, request_id))


def read_data_type(word: str, *, name: str, config: ModelConfig, request_id: str) -> DataType:
    """Return the data type with the protocol's name `word`.

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
    """Return a tensor from its binary form; elements of fixed size are a view of `data`.

    Raises:
        InferenceError: the shape does not match the size of the data.
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
        if "for model" not in error.message:  # Triton checks this before it knows the model
            raise InferenceError(error.message) from error
        raise fail(error.message, request_id=request_id) from error


def check_shape(name: str, shape: Sequence[int], *, config: ModelConfig, request_id: str) -> None:
    """Validate a shape without variable dimensions.

    Raises:
        InferenceError: a dimension is negative, or the shape is larger than any array's.
    """
    check_size(name, shape, config=config, request_id=request_id)
    if shape and min(shape) < 0:
        raise fail(
            f"All input dimensions should be specified for input '{name}' for model '{config.name}', "
            f"got [{','.join(map(str, shape))}]",
            request_id=request_id,
        )


def check_size(name: str, shape: Sequence[int], *, config: ModelConfig, request_id: str) -> None:
    """Validate the rank and the size of a shape.

    Raises:
        InferenceError: the shape has too many dimensions, or more elements than an array can have, also if
            one of its dimensions is 0.
    """
    if len(shape) > _MAX_RANK:
        message = f"no array can have the shape of input '{name}' for model '{config.name}'"
        raise fail(message, request_id=request_id)
    if abs(math.prod(size for size in shape if size)) > _MAX_ELEMENTS:
        raise fail(
            f"invalid shape for input '{name}': shape {shape_text(shape)} causes total element count to "
            f"exceed maximum size of {_MAX_ELEMENTS}",
            request_id=request_id,
        )


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


def classify(tensor: Tensor, *, count: int, labels: Sequence[str], batched: bool) -> Tensor:
    """Return the `count` highest values of each row as `value:index:label`, the highest first.

    Args:
        tensor: the output of a model.
        count: at least 1.
        labels: the labels of classes, by index; a class without one has only its index.
        batched: whether the first dimension is the batch; otherwise the tensor is one row.

    Returns:
        BYTES of shape [batch, k] or [k]: `0.900000:2:cat`; integers without a point.

    Raises:
        InferenceError: INVALID_ARG, the elements are not numbers, have half precision, or are more than a
            million in a row, as in Triton.
    """
    if tensor.data_type in _UNSUPPORTED:
        name = tensor.data_type.name
        raise InferenceError(f"class result not available for output due to unsupported type '{name}'")
    shape = tensor.shape[:1] if batched and tensor.shape else ()
    rows = tensor.array.reshape(*shape, -1)
    if rows.shape[-1] > _MAX_CLASSES:
        raise InferenceError("classification output tensor too large")
    kept = min(count, rows.shape[-1])
    # Reversed before and after the stable sort, to keep equal values in the order of their classes.
    order = rows.shape[-1] - 1 - np.argsort(rows[..., ::-1], axis=-1, kind="stable")[..., ::-1][..., :kept]
    values = np.take_along_axis(rows, order, axis=-1)
    pattern = "%f" if values.dtype.kind == "f" else "%d"
    texts = [
        _text(pattern % value, index, labels)
        for value, index in zip(values.reshape(-1).tolist(), order.reshape(-1).tolist(), strict=True)
    ]
    result = np.empty(len(texts), dtype=object)
    result[:] = texts
    return Tensor(tensor.name, result.reshape(order.shape))


def _text(value: str, index: int, labels: Sequence[str]) -> bytes:
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{value}:{index}{label}".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedOutput:
    """One entry of `outputs`.

    Attributes:
        name: the output's name.
        binary: whether HTTP sends it after the JSON rather than in it.
        classification: the number of classes to return; 0: the values.
        target: the shared memory to write it to; None: it is sent.
    """

    name: str
    binary: bool = False
    classification: int = 0
    target: RegionPart | None = None


def prepared(tensor: Tensor, *, requested: RequestedOutput | None, model: ModelVersion) -> Tensor:
    """Return an output in the requested form, and write it to shared memory if requested.

    Raises:
        InferenceError: it cannot be classified, or is larger than the shared memory.
    """
    if requested is None:
        return tensor
    if requested.classification:
        return classify(
            tensor,
            count=requested.classification,
            labels=model.labels.get(tensor.name, ()),
            batched=bool(model.config.max_batch_size),
        )
    if requested.target is not None:
        requested.target.store(tensor)
    return tensor
