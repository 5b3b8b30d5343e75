"""Infer response: the answer of a model as a `ModelInferResponse`."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2

from genserve.inference import Inference, InferenceResponse
from genserve.kserve.requested_output import prepared
from genserve.server.beside import beside, work_of
from genserve.server.grpc.infer_request import GrpcRequest
from genserve.server.grpc.parameters import SHARED_MEMORY, write_parameter
from genserve.tensor import Tensor

__all__ = ["empty_response", "write_response"]


def empty_response(request: GrpcRequest) -> Any:
    """Return a `ModelInferResponse` that says only whose it is."""
    inference = request.inference
    return service_pb2.ModelInferResponse(model_name=inference.model_name, id=inference.id)


async def write_response(response: InferenceResponse, *, request: GrpcRequest, inference: Inference) -> Any:
    """Return a `ModelInferResponse` of a response without an error.

    Raises:
        InferenceError: an output cannot be given as it was requested.
    """
    work = sum(_writing(output, request) for output in response.outputs)
    return await beside(work, _written, response, request=request, inference=inference)


def _writing(output: Tensor, request: GrpcRequest) -> int:
    requested = request.outputs.get(output.name)
    return work_of(output, copied=requested is None or not requested.classification)


def _written(response: InferenceResponse, *, request: GrpcRequest, inference: Inference) -> Any:
    message = empty_response(request)
    message.model_version = str(inference.model_version)
    for name, value in response.parameters.items():
        write_parameter(message.parameters[name], value)
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
    message.raw_output_contents.append(b"")     # clients count on one for each output
    [spec] = [spec for spec in request.message.outputs if spec.name == output.name][:1]
    for key in SHARED_MEMORY:
        if key in spec.parameters:
            entry.parameters[key].CopyFrom(spec.parameters[key])
