"""Generate extension: converts the members of a plain JSON object to tensors, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from genserve.config.model_config import TensorSpec
from genserve.errors import InferenceError
from genserve.inference import Inference, InferenceRequest, InferenceResponse, Parameter
from genserve.repository.model_versions import ModelVersion
from genserve.server.kserve.infer_body import custom_parameter, dump
from genserve.server.kserve.model_metadata import tensor_shape
from genserve.server.kserve.request_tensors import fail
from genserve.server.kserve.triton_parsing import (
    JsonKind,
    JsonText,
    Members,
    checked,
    elements_of,
    read_elements,
    read_pairs,
)
from genserve.tensor import DataType, Tensor

_NESTED = "parameters"
# U+0085, U+2028 and U+2029. JSON escapes those of ASCII.
_LINE_BREAK = re.compile(rb"\xc2\x85|\xe2\x80[\xa8\xa9]")


def read_generate_body(json_text: JsonText, *, model: ModelVersion, version: int) -> InferenceRequest:
    """Read the body of `generate` and `generate_stream`.

    A member with the name of an input is that input, all others are parameters of the request. The members
    of `parameters` follow the same rule.

    Raises:
        InferenceError: with Triton's text and code.
    """
    document = read_pairs(json_text)
    if not isinstance(document, Members):
        raise InferenceError("attempt to get members for non-object")
    reader = _GenerateReader(model)
    reader.request_id = next((_id(value) for name, value in document if name == "id"), "")
    reader.read(document, nests=True)
    return InferenceRequest(
        model_name=model.name,
        model_version=version,
        id=reader.request_id,
        inputs=reader.inputs,
        parameters=reader.parameters,
    )


def generated(response: InferenceResponse, *, inference: Inference) -> bytes:
    """Return a response as one JSON object, with sorted keys; an output with one element is a scalar.

    Raises:
        GenserveError: the model failed, or an output has no representation in JSON.
    """
    if response.error is not None:
        raise response.error
    document: dict[str, Any] = dict(response.parameters)
    for tensor in response.outputs:
        values = elements_of(tensor)
        document[tensor.name] = _scalar(values) if len(values) == 1 else values
    # Last, so that outputs of the model cannot replace them.
    document |= {"model_name": inference.request.model_name, "model_version": str(inference.model_version)}
    if inference.request.id:
        document["id"] = inference.request.id
    return dump(dict(sorted(document.items())))


def event_of(text: bytes) -> bytes:
    """Return JSON as one server-sent event, without characters at which some clients end a line."""
    return b"data: " + _LINE_BREAK.sub(_escaped, text) + b"\n\n"


def _escaped(line_break: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(line_break[0].decode())


class _GenerateReader:
    """Collects inputs and parameters from the members of a document."""

    def __init__(self, model: ModelVersion) -> None:
        self._model = model
        self.request_id = ""
        self.inputs: dict[str, Tensor] = {}
        self.parameters: dict[str, Parameter] = {}

    def read(self, members: Sequence[tuple[str, Any]], *, nests: bool) -> None:
        for name, value in members:
            if nests and name == _NESTED:
                self._read_nested(value)
                continue
            spec = self._model.config.input(name)
            if spec is None:
                # Triton reads the first value of a repeated key.
                self.parameters.setdefault(name, custom_parameter(name, value))
            elif name in self.inputs:
                raise fail(f"input '{name}' already exists in request", request_id=self.request_id)
            else:
                self.inputs[name] = self._tensor(spec, value)

    def _read_nested(self, members: Any) -> None:
        if not isinstance(members, Members):
            checked(members, JsonKind.OBJECT, doing=f"Expected JSON object for keyword: '{_NESTED}'")
        try:
            self.read(members, nests=False)
        except InferenceError as error:
            text = f"Converting keyword: '{_NESTED}': {error.message}"
            raise InferenceError(text, status=error.status, remedy=error.remedy) from None

    def _tensor(self, spec: TensorSpec, value: Any) -> Tensor:
        data_type = DataType.from_config_name(spec.data_type)
        data = value if type(value) is list else [value]
        shape = _filled(spec.name, tensor_shape(spec, config=self._model.config), count=len(data))
        array = read_elements(spec.name, data, data_type)
        if len(array) != len(data):
            text = "Unable to parse 'data': Shape does not match true shape of 'data' field"
            raise InferenceError(text)
        return Tensor(spec.name, array.reshape(shape), data_type=data_type)


def _filled(name: str, shape: Sequence[int], *, count: int) -> list[int]:
    """Return a shape for `count` elements: the last variable dimension takes what the fixed ones leave."""
    fixed = int(np.prod([size for size in shape if size != -1]))
    rest, left_over = divmod(count, fixed)
    filled = list(shape)
    for index in reversed(range(len(filled))):
        if filled[index] == -1:
            filled[index], rest = rest, 1
    if left_over or rest != 1:
        raise InferenceError(f"The schema can not convert input '{name}' to tensor with proper shape")
    return filled


def _id(value: Any) -> str:
    text: str = checked(value, JsonKind.STRING, doing="Unable to parse 'id'")
    return text


def _scalar(values: Any) -> Any:
    return values[0].item() if isinstance(values, np.ndarray) else values[0]
