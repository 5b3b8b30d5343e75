"""Infer messages: `ModelInferRequest` to an inference, and its response to `ModelInferResponse`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from genserve.config.model_config import ModelConfig
from genserve.errors import InferenceError
from genserve.inference import Inference, InferenceRequest, InferenceResponse, Parameter, RequestFlags
from genserve.repository.model_versions import ModelVersion
from genserve.server.http.offload import offload_if_large, write_cost
from genserve.server.kserve.request_tensors import (
    RequestedOutput,
    check_shape,
    fail,
    input_tensor,
    prepared,
    read_data_type,
)
from genserve.server.kserve.shared_memory import RegionPart, SharedMemory
from genserve.tensor import DataType, Tensor, narrowed

# The parameters of an input or output in shared memory.
_SHARED_MEMORY = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")
_EMPTY_FINAL = "triton_enable_empty_final_response"
_CHOICE = "parameter_choice"
_CUSTOM = ("int64_param", "bool_param", "string_param", "double_param")
_FLAGS = {"sequence_start": RequestFlags.SEQUENCE_START, "sequence_end": RequestFlags.SEQUENCE_END}
# The field of `InferTensorContents` for the elements of a type; FP16 and BF16 have none.
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
# The type that an error names for the elements of an unexpected field: the widest.
_FIELD_TYPES = {field: name for name, field in _FIELDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcRequest:
    """A parsed request, and how to write its responses.

    Attributes:
        inference: the parsed request.
        message: the `ModelInferRequest`.
        model: the requested model.
        outputs: the requested outputs with parameters, by name.
        empty_final_response: whether the end of a stream without a response is a message too.
    """

    inference: InferenceRequest
    message: Any
    model: ModelVersion
    outputs: Mapping[str, RequestedOutput]
    empty_final_response: bool


def read_request(
    message: Any, *, model: ModelVersion, shared_memory: SharedMemory, headers: Mapping[str, Parameter]
) -> GrpcRequest:
    """Parse a `ModelInferRequest`; tensors in raw form are views of its bytes.

    Args:
        message: the request.
        model: the requested model.
        shared_memory: the registered regions.
        headers: the headers to forward to the model as parameters.

    Raises:
        InferenceError: the request contradicts itself. `submit` validates it against the model's config.
    """
    custom: dict[str, Parameter] = {}
    fields = _read_parameters(message.parameters, custom)
    empty_final_response = fields.pop("empty_final_response", False)
    requested: dict[str, None] = {}
    for output in message.outputs:
        if model.config.output(output.name) is None:
            raise InferenceError(f"unexpected inference output '{output.name}' for model '{model.name}'")
        if output.name in requested:
            raise fail(f"output '{output.name}' already exists in request", request_id=message.id)
        requested[output.name] = None
    inputs: dict[str, Tensor] = {}
    for tensor in _tensors(message, model.config, shared_memory):
        if tensor.name in inputs:
            raise fail(f"input '{tensor.name}' already exists in request", request_id=message.id)
        inputs[tensor.name] = tensor
    request = InferenceRequest(
        model_name=model.name,
        # Without a version `submit` takes the latest, which may have changed meanwhile.
        model_version=model.version if message.model_version else -1,
        id=message.id,
        inputs=inputs,
        requested_outputs=tuple(requested),
        parameters={**custom, **headers} if headers else custom,
        **fields,
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
        empty_final_response=empty_final_response,
    )


def _read_parameters(messages: Mapping[str, Any], custom: dict[str, Parameter]) -> dict[str, Any]:
    """Return the request fields that parameters set; add all other parameters to `custom`.

    Raises:
        InferenceError: a value has the wrong type, or a name is reserved.
    """
    fields: dict[str, Any] = {"flags": RequestFlags.NONE}
    for name, message in messages.items():
        if name == "sequence_id":
            given = _typed(message, "int64_param", "string_param", what=f"'{name}' parameter")
            fields["correlation_id"] = _unsigned(given)
        elif name in _FLAGS:
            fields["flags"] |= _FLAGS[name] * _typed(message, "bool_param", what=f"'{name}' parameter")
        elif name == "priority":
            fields["priority"] = _priority(message)
        elif name == "timeout":
            fields["timeout_us"] = _unsigned(_typed(message, "int64_param", what=f"'{name}' parameter"))
        elif name == _EMPTY_FINAL:
            fields["empty_final_response"] = _typed(message, "bool_param", what=f"'{name}' parameter")
        elif name.startswith("triton_"):
            raise InferenceError(
                "parameter keys starting with 'triton_' are reserved for Triton usage. "
                f"Only the following keys starting with 'triton_' are allowed: {_EMPTY_FINAL}"
            )
        else:
            custom[name] = _custom(name, message)
    return fields


def _read_classification(messages: Mapping[str, Any]) -> int:
    """Return the number of classes that an output's parameters request; 0: its values.

    Raises:
        InferenceError: it is no number, or less than one.
    """
    message = messages.get("classification")
    if message is None:
        return 0
    if message.WhichOneof(_CHOICE) != "int64_param":
        raise InferenceError("invalid value type for 'classification' parameter, expected int64_param")
    count: int = message.int64_param
    if count <= 0:
        raise InferenceError("invalid value for 'classification' parameter, expected >= 0")
    return count


def _read_shared_memory(tensor: Any, shared_memory: SharedMemory) -> RegionPart | None:
    """Return the part of a region that the parameters of an input or output name; None: no region.

    Raises:
        InferenceError: they contradict each other, or there is no such part.
    """
    messages, name = tensor.parameters, tensor.name
    region, size, offset = (messages.get(key) for key in _SHARED_MEMORY)
    where = f"parameter for tensor '{name}'"
    if region is None:
        for key, message in ((_SHARED_MEMORY[2], offset), (_SHARED_MEMORY[1], size)):
            if message is not None:
                raise InferenceError(f"'{key}' can not be specified without '{_SHARED_MEMORY[0]}' {where}")
        return None
    region_name = _typed(region, "string_param", what=f"'{_SHARED_MEMORY[0]}' {where}")
    start = 0 if offset is None else _typed(offset, "int64_param", what=f"'{_SHARED_MEMORY[2]}' {where}")
    if size is None:
        text = f"'{_SHARED_MEMORY[1]}' must be specified along with '{_SHARED_MEMORY[0]}' {where}"
        raise InferenceError(text)
    byte_size = _typed(size, "int64_param", what=f"'{_SHARED_MEMORY[1]}' {where}")
    return shared_memory.part(region_name, offset=start, byte_size=byte_size)


def _write_parameter(message: Any, value: Parameter) -> None:
    """Set an `InferParameter`."""
    if isinstance(value, bool):
        message.bool_param = value
    elif isinstance(value, int):
        # A negative sequence_id is an unsigned number for us, as for Triton, and goes back as it came.
        message.int64_param = value if value < 2**63 else value - 2**64
    elif isinstance(value, float):
        message.double_param = value
    else:
        message.string_param = value


def _typed(message: Any, *choices: str, what: str) -> Any:
    choice = message.WhichOneof(_CHOICE)
    if choice not in choices:
        raise InferenceError(f"invalid value type for {what}, expected {' or '.join(choices)}.")
    return getattr(message, choice)


def _unsigned(value: int | str) -> int | str:
    return value % 2**64 if isinstance(value, int) else value  # cast as in Triton


def _priority(message: Any) -> int:
    priority: int = _typed(message, "int64_param", "uint64_param", what="'priority' parameter")
    if priority < 0:
        raise InferenceError("invalid value for 'priority', expected value >= 0.")
    return priority


def _custom(name: str, message: Any) -> Parameter:
    choice = message.WhichOneof(_CHOICE)
    if choice not in _CUSTOM:
        raise InferenceError(
            f"invalid value type for '{name}' parameter, expected int64_param, bool_param, or string_param."
        )
    value: Parameter = getattr(message, choice)
    return value


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
        part = _read_shared_memory(spec, shared_memory) if spec.parameters else None
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
        classification=_read_classification(spec.parameters),
        target=_read_shared_memory(spec, shared_memory),
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
    array = _array(elements, data_type, name=spec.name)
    check_shape(spec.name, spec.shape, config=config, request_id=request_id)
    if array.size == np.prod(spec.shape, dtype=np.int64):
        return Tensor(spec.name, array.reshape(spec.shape), data_type=data_type)
    # A wrong number of elements gives the same error as in raw form.
    data = Tensor(spec.name, array, data_type=data_type).to_bytes()
    return input_tensor(
        spec.name, data, data_type=data_type, shape=spec.shape, config=config, request_id=request_id
    )


def _array(elements: Any, data_type: DataType, *, name: str) -> NDArray[Any]:
    if data_type is DataType.BYTES:
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array
    # The narrow types are sent in 32 bits.
    wide = {"i": np.int64, "u": np.uint64}.get(data_type.numpy.kind, data_type.numpy)
    return narrowed(np.fromiter(elements, dtype=wide, count=len(elements)), data_type, name=name)


def empty_response(request: GrpcRequest) -> Any:
    """Return a `ModelInferResponse` with the names of its model and request only."""
    inference = request.inference
    return service_pb2.ModelInferResponse(model_name=inference.model_name, id=inference.id)


async def write_response(response: InferenceResponse, *, request: GrpcRequest, inference: Inference) -> Any:
    """Return the `ModelInferResponse` for a response without an error.

    Raises:
        InferenceError: an output cannot be given as it was requested.
    """
    cost = sum(_write_cost(output, request) for output in response.outputs)
    return await offload_if_large(cost, _write_response, response, request=request, inference=inference)


def _write_cost(output: Tensor, request: GrpcRequest) -> int:
    requested = request.outputs.get(output.name)
    return write_cost(output, copied=requested is None or not requested.classification)


def _write_response(response: InferenceResponse, *, request: GrpcRequest, inference: Inference) -> Any:
    message = empty_response(request)
    message.model_version = str(inference.model_version)
    for name, value in response.parameters.items():
        _write_parameter(message.parameters[name], value)
    for output in response.outputs:
        _write_output(message, output, request)
    return message


def _write_output(message: Any, output: Tensor, request: GrpcRequest) -> None:
    requested = request.outputs.get(output.name)
    tensor = prepared(output, requested=requested, model=request.model)
    entry = message.outputs.add(name=tensor.name, datatype=tensor.data_type.name, shape=tensor.shape)
    if requested is None or requested.target is None:
        message.raw_output_contents.append(bytes(tensor.to_bytes()))
        return
    message.raw_output_contents.append(b"")     # clients expect one for each output
    [spec] = [spec for spec in request.message.outputs if spec.name == output.name][:1]
    for key in _SHARED_MEMORY:
        if key in spec.parameters:
            entry.parameters[key].CopyFrom(spec.parameters[key])
