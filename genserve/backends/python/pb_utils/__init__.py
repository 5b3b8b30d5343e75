"""pb_utils: the module `triton_python_backend_utils`, the interface of a model.py to the server.

Importing this package makes it importable by that name, and as `c_python_backend_utils`. The server imports
it before it loads the first model.py. Import it explicitly to run a model.py in a test or under a debugger:

    import genserve.backends.python.pb_utils
    from my_repository.my_model.model import TritonPythonModel
"""

from __future__ import annotations

import json as json
import struct as struct
import sys

import numpy as np

from genserve.backends.python.model_context import current_context
from genserve.backends.python.pb_utils.pb_config import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)
from genserve.backends.python.pb_utils.pb_error import TritonError, TritonModelException
from genserve.backends.python.pb_utils.pb_request import (
    InferenceRequest,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
)
from genserve.backends.python.pb_utils.pb_response import (
    InferenceResponse,
    InferenceResponseSender,
    ResponseIterator,
)
from genserve.backends.python.pb_utils.pb_server import (
    Logger,
    Metric,
    MetricFamily,
    is_model_ready,
    load_model,
    unload_model,
)
from genserve.backends.python.pb_utils.pb_tensor import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "np",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return an input of a request by name, or None."""
    return _named(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return an output of a response by name, or None."""
    return _named(inference_response.output_tensors(), name)


def get_model_dir() -> str:
    """Return the folder of the version of the calling model.

    Raises:
        TritonModelException: the caller is not a model of a server.
    """
    context = current_context()
    if context is None:
        raise TritonModelException("get_model_dir must be called by a model that a server has loaded")
    return str(context.folder)


def _named(tensors: list[Tensor], name: str) -> Tensor | None:
    for tensor in tensors:
        if tensor._wrapped.name == name:
            return tensor
    return None


for _name in ("triton_python_backend_utils", "c_python_backend_utils"):
    sys.modules[_name] = sys.modules[__name__]
