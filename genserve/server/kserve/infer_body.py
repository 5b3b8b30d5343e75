"""Infer body: the HTTP bodies of inference requests and responses, with JSON and binary tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from genserve.errors import InferenceError
from genserve.inference import Inference, InferenceRequest, InferenceResponse, Parameter, RequestFlags
from genserve.repository.model_versions import ModelVersion
from genserve.server.kserve.number_lists import (
    SLICE_ELEMENTS,
    CutText,
    NotNumbersError,
    cut_lists,
    read_numbers,
    write_list,
)
from genserve.server.kserve.request_tensors import RequestedOutput, check_size, fail, input_tensor, prepared
from genserve.server.kserve.shared_memory import RegionPart, SharedMemory
from genserve.server.kserve.triton_parsing import (
    JsonKind,
    JsonText,
    checked,
    elements_of,
    member,
    read_elements,
    read_json,
)
from genserve.tensor import DataType, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequestBody:
    """A parsed request body.

    Attributes:
        request: the inference request that the model gets.
        outputs: the entries of `outputs`, by name; empty: all outputs are requested.
        binary: whether outputs without an entry are sent in binary form after the JSON.
    """

    request: InferenceRequest
    outputs: Mapping[str, RequestedOutput]
    binary: bool = False

    def requested(self, name: str) -> RequestedOutput:
        """Return the requested form of an output."""
        return self.outputs.get(name) or RequestedOutput(name=name, binary=self.binary)


def read_infer_body(
    json_text: JsonText,
    tail: memoryview,
    *,
    model: ModelVersion,
    version: int,
    shared_memory: SharedMemory,
    parameters: Mapping[str, Parameter],
) -> InferRequestBody:
    """Parse a JSON document and the binary tensors after it, which are views of `tail`.

    Args:
        json_text: the document.
        tail: the bytes after the document, writable if models may write into their inputs.
        model: the requested model.
        version: the requested version; -1: the latest.
        shared_memory: the registered regions.
        parameters: the request's parameters, which those in the document override.

    Raises:
        InferenceError: with Triton's message and status.
    """
    def read(document: Any, lists: Mapping[str, memoryview]) -> InferRequestBody:
        reader = _BodyReader(document, tail, model=model, shared_memory=shared_memory, lists=lists)
        return reader.read(version=version, parameters=parameters)

    cut = cut_lists(json_text)
    if cut.lists:
        with suppress(NotNumbersError):
            return read(_document(cut), cut.lists)
    return read(read_json(json_text), {})


def _document(cut: CutText) -> Any:
    """Parse a document without its long lists; raises NotNumbersError if it is not JSON without them."""
    try:
        return read_json(cut.text)
    except InferenceError:  # with other offsets than those of the whole document
        raise NotNumbersError from None


def read_raw_body(
    data: memoryview, *, model: ModelVersion, version: int, parameters: Mapping[str, Parameter]
) -> InferRequestBody:
    """Parse a body that contains only the bytes of a model's only input; all outputs are binary then.

    Raises:
        InferenceError: INVALID_ARG, the model has several inputs, or the shape cannot be deduced.
    """
    config = model.config
    if len(config.inputs) != 1:
        raise fail(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(config.inputs)} inputs "
            f"in '{model.name}' model configuration",
            request_id="",
        )
    spec = config.inputs[0]
    data_type = DataType.from_config_name(spec.data_type)
    lead = [1] if config.max_batch_size else []
    if data_type is DataType.BYTES:
        if spec.dims != (1,):
            text = f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]"
            raise fail(text, request_id="")
        array = np.empty((*lead, 1), dtype=object)
        array.reshape(-1)[0] = bytes(data)
        tensor = Tensor(spec.name, array)
    else:
        shape = [*lead, *_deduced(spec.name, spec.dims, num_elements=len(data) // data_type.itemsize)]
        if math.prod(shape) * data_type.itemsize != len(data):
            expected = math.prod(shape) * data_type.itemsize
            raise fail(
                f"input byte size mismatch for input 'raw_input' for model '{model.name}'. "
                f"Expected {expected}, got {len(data)}",
                request_id="",
            )
        tensor = Tensor.from_bytes(spec.name, data, data_type=data_type, shape=shape)
    request = InferenceRequest(
        model_name=model.name, model_version=version, inputs={spec.name: tensor}, parameters=parameters
    )
    return InferRequestBody(request=request, outputs={}, binary=True)


def custom_parameter(name: str, value: Any) -> Parameter:
    """Return the value of a request's parameter.

    Raises:
        InferenceError: INVALID_ARG, the value is null, a list or an object.
    """
    if isinstance(value, (bool, int, float, str)):
        return value
    raise InferenceError(
        f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
    )


class _BodyReader:
    """Parses one document."""

    def __init__(
        self,
        document: Any,
        tail: memoryview,
        *,
        model: ModelVersion,
        shared_memory: SharedMemory,
        lists: Mapping[str, memoryview],
    ) -> None:
        self._document = document
        self._lists = lists     # that were cut out of the document, by their markers
        self._tail = tail
        self._model = model
        self._shared_memory = shared_memory
        self._position = 0
        self._id = ""
        self._late: InferenceError | None = None  # which Triton reports after parsing everything else

    def read(self, *, version: int, parameters: Mapping[str, Parameter]) -> InferRequestBody:
        document = self._document
        given = isinstance(document, dict)
        if given and "id" in document:
            self._id = checked(document["id"], JsonKind.STRING, doing="Unable to parse 'id'")
        merged = dict(parameters)
        fields: dict[str, Any] = {}
        if given and "parameters" in document:
            fields = _read_parameters(document["parameters"], merged)
        binary = fields.pop("binary", False)
        inputs = self._inputs(member(document, "inputs", JsonKind.ARRAY))
        if self._position != len(self._tail):
            raise InferenceError(f"unexpected additional input data for model '{self._model.name}'")
        outputs = {}
        if "outputs" in document:
            outputs = self._outputs(member(document, "outputs", JsonKind.ARRAY))
        if self._late is not None:
            raise self._late
        request = InferenceRequest(
            model_name=self._model.name,
            model_version=version,
            id=self._id,
            inputs=inputs,
            requested_outputs=tuple(outputs),
            parameters=merged,
            **fields,
        )
        return InferRequestBody(request=request, outputs=outputs, binary=binary)

    def _inputs(self, entries: list[Any]) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}
        for entry in entries:
            content = _content_of(entry)
            name = member(entry, "name", JsonKind.STRING)
            data_type = _data_type(name, member(entry, "datatype", JsonKind.STRING))
            shape = _shape(member(entry, "shape", JsonKind.ARRAY))
            if name in inputs:
                raise fail(f"input '{name}' already exists in request", request_id=self._id)
            tensor = (
                self._of_json(entry, name=name, data_type=data_type, shape=shape)
                if content == "data"
                else self._of_bytes(self._data(content, entry), name=name, data_type=data_type, shape=shape)
            )
            if tensor is not None:
                inputs[name] = tensor
        return inputs

    def _of_json(self, entry: Any, *, name: str, data_type: DataType, shape: list[int]) -> Tensor | None:
        array = self._elements(name, member(entry, "data", JsonKind.ARRAY), data_type)
        check_size(name, shape, config=self._model.config, request_id=self._id)
        if len(array) == math.prod(shape):
            return Tensor(name, array.reshape(shape), data_type=data_type)
        if data_type is not DataType.BYTES:
            text = "Unable to parse 'data': Shape does not match true shape of 'data' field"
            raise InferenceError(text)
        # For the error message that the same strings get in binary form.
        return self._of_bytes(
            memoryview(Tensor(name, array).to_bytes()), name=name, data_type=data_type, shape=shape
        )

    def _elements(self, name: str, data: list[Any], data_type: DataType) -> NDArray[Any]:
        cut_out = self._lists.get(data[0]) if len(data) == 1 and isinstance(data[0], str) else None
        if cut_out is None:
            return read_elements(name, data, data_type)
        return read_numbers(
            cut_out, lambda values, start: read_elements(name, values, data_type, start=start)
        )

    def _of_bytes(
        self, data: memoryview, *, name: str, data_type: DataType, shape: list[int]
    ) -> Tensor | None:
        """Return an input; None: its size is wrong, which Triton reports after parsing everything else."""
        try:
            tensor = input_tensor(
                name, data, data_type=data_type, shape=shape, config=self._model.config, request_id=self._id
            )
        except InferenceError as error:
            self._late = self._late or error
            return None
        # After strings, numbers may be unaligned, which some runtimes do not accept.
        if not tensor.array.flags.aligned:
            return Tensor(name, tensor.array.copy(), data_type=data_type)
        return tensor

    def _data(self, content: str, entry: Any) -> memoryview:
        given = entry["parameters"]
        if content == "shared_memory_region":
            return self._shared(given).read()
        return self._take(entry["name"], member(given, "binary_data_size", JsonKind.UNSIGNED))

    def _take(self, name: str, size: int) -> memoryview:
        data = self._tail[self._position : self._position + size]
        if len(data) < size:
            raise InferenceError(
                f"unexpected size for input '{name}', expecting {size - len(data)} additional bytes "
                f"for model '{self._model.name}'"
            )
        self._position += size
        return data

    def _outputs(self, entries: list[Any]) -> dict[str, RequestedOutput]:
        outputs: dict[str, RequestedOutput] = {}
        for entry in entries:
            output = self._output(entry, _parameters_of(entry))
            if output.name in outputs:
                raise fail(f"output '{output.name}' already exists in request", request_id=self._id)
            outputs[output.name] = output
        return outputs

    def _output(self, entry: Any, given: Mapping[str, Any]) -> RequestedOutput:
        binary = checked(
            given.get("binary_data", False), JsonKind.BOOLEAN, doing="Unable to parse 'binary_data'"
        )
        shared = "shared_memory_region" in given
        if shared and binary:
            raise InferenceError("Output can't set both 'shared_memory_region' and 'binary_data'")
        if shared and "classification" in given:
            raise InferenceError("Output can't set both 'shared_memory_region' and 'classification'")
        classes = given.get("classification", 0)
        return RequestedOutput(
            name=member(entry, "name", JsonKind.STRING),
            classification=checked(classes, JsonKind.UNSIGNED, doing="Unable to set 'classification'"),
            binary=binary,
            target=self._shared(given) if shared else None,
        )

    def _shared(self, given: Mapping[str, Any]) -> RegionPart:
        region = member(given, "shared_memory_region", JsonKind.STRING)
        offset, byte_size = (
            checked(given.get(key, 0), JsonKind.UNSIGNED, doing=f"Unable to parse '{key}'")
            for key in ("shared_memory_offset", "shared_memory_byte_size")
        )
        return self._shared_memory.part(region, offset=offset, byte_size=byte_size)


def _read_parameters(given: Any, custom: dict[str, Parameter]) -> dict[str, Any]:
    """Return the request fields that parameters set; add all other parameters to `custom`."""
    if not isinstance(given, dict):
        text = "failed to get request params.: attempt to get members for non-object"
        raise InferenceError(text)
    fields: dict[str, Any] = {}
    flags = RequestFlags.NONE
    for name, value in given.items():
        doing = f"Unable to parse '{name}'"
        match name:
            case "sequence_id":
                number = type(value) is int and value >= 0
                fields["correlation_id"] = value if number else checked(value, JsonKind.STRING, doing=doing)
            case "sequence_start":
                flags |= RequestFlags.SEQUENCE_START * checked(value, JsonKind.BOOLEAN, doing=doing)
            case "sequence_end":
                flags |= RequestFlags.SEQUENCE_END * checked(value, JsonKind.BOOLEAN, doing=doing)
            case "priority":
                fields["priority"] = checked(value, JsonKind.UNSIGNED, doing=doing)
            case "timeout":
                fields["timeout_us"] = checked(value, JsonKind.UNSIGNED, doing=doing)
            case "binary_data_output":
                fields["binary"] = checked(value, JsonKind.BOOLEAN, doing=doing)
            case _ if name.startswith("triton_"):
                raise InferenceError(
                    "parameter keys starting with 'triton_' are reserved for Triton usage and should not be "
                    "specified."
                )
            case _:
                custom[name] = custom_parameter(name, value)
    fields["flags"] = flags
    return fields


def _parameters_of(entry: Any) -> Mapping[str, Any]:
    given = entry.get("parameters") if isinstance(entry, dict) else None
    return given if isinstance(given, dict) else {}


def _content_of(entry: Any) -> str:
    """Return the name of the field that contains the data of an input."""
    given = _parameters_of(entry)
    found = ["data"] if isinstance(entry, dict) and "data" in entry else []
    found += [name for name in ("binary_data_size", "shared_memory_region") if name in given]
    if len(found) == 1:
        return found[0]
    which = f"set {' '.join(map(repr, found))}" if found else "no field is set"
    raise InferenceError(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'. But {which}"
    )


def _data_type(name: str, word: str) -> DataType:
    try:
        return DataType[word]
    except KeyError:
        raise InferenceError(f"invalid datatype for input {name}") from None


def _shape(values: list[Any]) -> list[int]:
    return [checked(value, JsonKind.UNSIGNED, doing="Unable to parse 'shape'") for value in values]


def _deduced(name: str, dims: tuple[int, ...], *, num_elements: int) -> list[int]:
    if dims.count(-1) > 1:
        raise fail(
            f"The shape of the raw input '{name}' can not be deduced because there are more than one "
            "variable-sized dimension",
            request_id="",
        )
    fixed = math.prod(dim for dim in dims if dim != -1)
    return [num_elements // fixed if dim == -1 else dim for dim in dims]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferResponseBody:
    """A response body.

    Attributes:
        body: JSON, then the binary tensors.
        header_length: the length of the JSON; None: there are no binary tensors.
    """

    body: bytes
    header_length: int | None = None


def write_infer_response(
    response: InferenceResponse, *, inference: Inference, request_body: InferRequestBody, model: ModelVersion
) -> InferResponseBody:
    """Return the body of a response; outputs for shared memory are written there.

    Raises:
        InferenceError: an output cannot be returned as requested.
    """
    blobs: list[bytes | memoryview] = []
    outputs = [
        _output(tensor, requested=request_body.requested(tensor.name), model=model, blobs=blobs)
        for tensor in response.outputs
    ]
    document: dict[str, Any] = {"id": inference.request.id} if inference.request.id else {}
    document |= {"model_name": inference.request.model_name, "model_version": str(inference.model_version)}
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    document["outputs"] = outputs
    head = dump(document)
    if not blobs:
        return InferResponseBody(body=head)
    return InferResponseBody(body=b"".join((head, *blobs)), header_length=len(head))


def dump(document: dict[str, Any]) -> bytes:
    """Serialize JSON, with arrays as lists, and NaN and infinities as bare words, as Triton does."""
    if _is_finite(document):
        if any(len(output.get("data", ())) > SLICE_ELEMENTS for output in document.get("outputs", ())):
            return _dumped_in_slices(document)
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), default=np.ndarray.tolist)
    return text.encode()


def _dumped_in_slices(value: Any) -> bytes:
    if isinstance(value, dict):
        members = [orjson.dumps(name) + b":" + _dumped_in_slices(member) for name, member in value.items()]
        return b"{" + b",".join(members) + b"}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return b"[" + b",".join(map(_dumped_in_slices, value)) + b"]"
    return write_list(value) if isinstance(value, (list, np.ndarray)) else orjson.dumps(value)


def _output(
    tensor: Tensor, *, requested: RequestedOutput, model: ModelVersion, blobs: list[bytes | memoryview]
) -> dict[str, Any]:
    tensor = prepared(tensor, requested=requested, model=model)
    entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.data_type.name, "shape": tensor.shape}
    if requested.target is not None:
        return entry
    if requested.binary:
        data = tensor.to_bytes()
        entry["parameters"] = {"binary_data_size": len(data)}
        if len(data):
            blobs.append(data)
    else:
        entry["data"] = elements_of(tensor)
    return entry


def _is_finite(value: Any) -> bool:
    """Whether all numbers of a document are finite; arrays are only in mappings, not in lists."""
    if isinstance(value, (str, int)):
        return True
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return not (value and isinstance(value[0], dict)) or all(map(_is_finite, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    return not isinstance(value, float) or math.isfinite(value)
