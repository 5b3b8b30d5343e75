"""Infer answer: a response of a model to the HTTP body that tells it, JSON and binary tensors."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from genserve.inference import Inference, InferenceResponse
from genserve.kserve.infer_body import InferBody
from genserve.kserve.json_elements import elements_of
from genserve.kserve.models import ServedModel
from genserve.kserve.requested_output import RequestedOutput, prepared
from genserve.tensor import Tensor

__all__ = ["InferAnswer", "answer_of", "dump"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferAnswer:
    """A body.

    Attributes:
        body: JSON, and what follows it.
        header_length: the length of the JSON; None: there is nothing but JSON.
    """

    body: bytes
    header_length: int | None = None


def answer_of(
    response: InferenceResponse, *, inference: Inference, asked: InferBody, model: ServedModel
) -> InferAnswer:
    """Return the body that answers a request; outputs that go into shared memory are written there.

    Raises:
        InferenceError: an output cannot be told as it was asked for.
    """
    blobs: list[bytes | memoryview] = []
    outputs = [
        _output(tensor, requested=asked.outputs.get(tensor.name), asked=asked, model=model, blobs=blobs)
        for tensor in response.outputs
    ]
    document: dict[str, Any] = {"id": inference.request.id} if inference.request.id else {}
    document |= {"model_name": inference.model_name, "model_version": str(inference.model_version)}
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    document["outputs"] = outputs
    head = dump(document)
    if not blobs:
        return InferAnswer(body=head)
    return InferAnswer(body=b"".join((head, *blobs)), header_length=len(head))


def dump(document: dict[str, Any]) -> bytes:
    """Write JSON, arrays as lists, NaN and infinities as Triton does: as bare words."""
    if _is_finite(document):
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), default=np.ndarray.tolist)
    return text.encode()


def _output(
    tensor: Tensor,
    *,
    requested: RequestedOutput | None,
    asked: InferBody,
    model: ServedModel,
    blobs: list[bytes | memoryview],
) -> dict[str, Any]:
    tensor = prepared(tensor, requested=requested, model=model)
    entry: dict[str, Any] = {
        "name": tensor.name,
        "datatype": tensor.data_type.name,
        "shape": tensor.shape,
    }
    if requested is not None and requested.target is not None:
        return entry
    if requested.binary if requested is not None else asked.binary:
        data = tensor.to_bytes()
        entry["parameters"] = {"binary_data_size": len(data)}
        if len(data):
            blobs.append(data)
    else:
        entry["data"] = elements_of(tensor)
    return entry


def _is_finite(value: Any) -> bool:
    """Whether no number of a document is NaN or infinite; arrays stand in mappings, never in lists."""
    if isinstance(value, (str, int)):
        return True
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return not (value and isinstance(value[0], dict)) or all(map(_is_finite, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    return not isinstance(value, float) or math.isfinite(value)
