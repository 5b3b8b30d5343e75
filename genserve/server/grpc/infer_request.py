"""Infer request: a `ModelInferRequest` as an inference of the model it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.config.model_config import ModelConfig
from genserve.data_type import DataType
from genserve.errors import InferenceError
from genserve.inference import InferenceRequest, Parameter
from genserve.kserve.input_tensor import check_shape, fail, input_tensor, read_data_type
from genserve.kserve.models import ServedModel
from genserve.kserve.requested_output import RequestedOutput
from genserve.kserve.shared_memory import SharedMemory
from genserve.server.grpc.parameters import read_classification, read_parameters, read_shared_memory
from genserve.tensor import Tensor

__all__ = ["GrpcRequest", "read_request"]

# Which field of `InferTensorContents` holds elements of a type; FP16 and BF16 have none.
_FIELDS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
# What a field holds when it is not what was expected.
_FIELD_TYPES: Mapping[str, str] = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcRequest:
    """A request, and how its responses are to be written.

    Attributes:
        inference: what is asked of the model.
        message: the `ModelInferRequest`.
        model: that it is asked of.
        outputs: those that are not simply sent, by name.
        empty_final_response: in a stream, an end without a response is a message too.
    """

    inference: InferenceRequest
    message: Any
    model: ServedModel
    outputs: Mapping[str, RequestedOutput]
    empty_final_response: bool


def read_request(
    message: Any, *, model: ServedModel, shared_memory: SharedMemory, headers: Mapping[str, Parameter]
) -> GrpcRequest:
    """Read a `ModelInferRequest`; tensors in raw form are views of its bytes.

    Args:
        message: the request.
        model: that it names.
        shared_memory: where its tensors may be.
        headers: that are forwarded to the model as parameters.

    Raises:
        InferenceError: it contradicts itself. What the model's config says of it is left to the door.
    """
    parameters = read_parameters(message.parameters)
    inputs: dict[str, Tensor] = {}
    for tensor in _tensors(message, model.config, shared_memory):
        if tensor.name in inputs:
            raise fail(f"input '{tensor.name}' already exists in request", request_id=message.id)
        inputs[tensor.name] = tensor
    for output in message.outputs:
        if model.config.output(output.name) is None:
            raise InferenceError(f"unexpected inference output '{output.name}' for model '{model.name}'")
    request = InferenceRequest(
        model_name=model.name,
        # Without a version the door chooses, even if another one has become the latest meanwhile.
        model_version=model.version if message.model_version else -1,
        id=message.id,
        inputs=inputs,
        requested_outputs=tuple(dict.fromkeys(output.name for output in message.outputs)),
        parameters={**parameters.custom, **headers} if headers else parameters.custom,
        correlation_id=parameters.correlation_id,
        flags=parameters.flags,
        priority=parameters.priority,
        timeout_us=parameters.timeout_us,
    )
    return GrpcRequest(
        inference=request,
        message=message,
        model=model,
        outputs={
            output.name: _requested_output(output, shared_memory)
            for output in message.outputs
            if output.parameters
        },
        empty_final_response=parameters.empty_final_response,
    )


def _tensors(message: Any, config: ModelConfig, shared_memory: SharedMemory) -> Iterator[Tensor]:
    raw = message.raw_input_contents
    blobs = iter(raw)
    for spec in message.inputs:
        if config.input(spec.name) is None:
            raise InferenceError(f"unexpected inference input '{spec.name}' for model '{config.name}'")
        if spec.HasField("contents"):
            if raw:
                raise InferenceError(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{spec.name}' for model '{config.name}'"
                )
            yield _typed_tensor(spec, config=config, request_id=message.id)
            continue
        data_type = read_data_type(spec.datatype, name=spec.name, config=config, request_id=message.id)
        part = read_shared_memory(spec, shared_memory) if spec.parameters else None
        blob = next(blobs, None) if part is None else part.read()
        if blob is None:
            raise InferenceError(
                f"unable to find data for input tensor '{spec.name}' for model '{config.name}' in request."
            )
        yield input_tensor(
            spec.name, blob, data_type=data_type, shape=spec.shape, config=config, request_id=message.id
        )


def _requested_output(spec: Any, shared_memory: SharedMemory) -> RequestedOutput:
    return RequestedOutput(
        name=spec.name,
        classification=read_classification(spec.parameters),
        target=read_shared_memory(spec, shared_memory),
    )


def _typed_tensor(spec: Any, *, config: ModelConfig, request_id: str) -> Tensor:
    expected = _FIELDS.get(spec.datatype)
    elements: Any = ()
    for field, value in spec.contents.ListFields():
        if field.name != expected:
            known = spec.datatype if spec.datatype in DataType.__members__ else "<invalid>"
            raise InferenceError(
                f"unexpected explicit tensor data for input tensor '{spec.name}' for model '{config.name}' "
                f"of type '{_FIELD_TYPES[field.name]}', expected datatype '{known}'"
            )
        elements = value
    data_type = read_data_type(spec.datatype, name=spec.name, config=config, request_id=request_id)
    array = _array(elements, data_type)
    check_shape(spec.name, spec.shape, config=config, request_id=request_id)
    if array.size == np.prod(spec.shape, dtype=np.int64):
        return Tensor(spec.name, array.reshape(spec.shape), data_type=data_type)
    # Bytes that do not fit give the same error as they do in raw form.
    data = Tensor(spec.name, array, data_type=data_type).to_bytes()
    return input_tensor(
        spec.name, data, data_type=data_type, shape=spec.shape, config=config, request_id=request_id
    )


def _array(elements: Any, data_type: DataType) -> NDArray[Any]:
    if data_type is DataType.BYTES:
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array
    # The narrow types travel in 32 bits; what does not fit is cut off, as Triton does.
    wide = {"i": np.int64, "u": np.uint64}.get(data_type.numpy.kind, data_type.numpy)
    return np.fromiter(elements, dtype=wide, count=len(elements)).astype(data_type.numpy, copy=False)
