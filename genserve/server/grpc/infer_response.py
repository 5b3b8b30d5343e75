"""Infer response: the answer of a model as a `ModelInferResponse`."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2

from genserve.inference import Inference, InferenceResponse
from genserve.server.grpc.parameters import write_parameter

__all__ = ["write_response"]


def write_response(response: InferenceResponse | None, *, inference: Inference) -> Any:
    """Return a `ModelInferResponse`; None: an empty one, which says only whose it is."""
    request = inference.request
    message = service_pb2.ModelInferResponse(
        model_name=request.model_name, model_version=str(inference.model_version), id=request.id
    )
    if response is None or response.error is not None:
        return message
    for name, value in response.parameters.items():
        write_parameter(message.parameters[name], value)
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.data_type.name, shape=tensor.shape)
        message.raw_output_contents.append(bytes(tensor.to_bytes()))
    return message
