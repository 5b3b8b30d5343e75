"""Small Python models, written in a line, and requests to them."""

from __future__ import annotations

import queue
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from genserve.files import replacement
from genserve.inference import Inference, InferenceRequest, InferenceResponse, InferenceServer
from genserve.tensor import Tensor

ADD = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + {number})]))
            return responses
"""
CONFIG = """
    backend: "python"
    input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


def write_model(
    root: Path, name: str, *, code: str = "", number: int = 1, config: str = CONFIG, version: int = 1
) -> Path:
    """Write a model that adds `number`, or that has this code; return its folder.

    A server that polls it never reads half a file.
    """
    folder = root / name
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    files = {"config.pbtxt": config, f"{version}/model.py": code or ADD.replace("{number}", str(number))}
    for path, text in files.items():
        with replacement(folder / path) as new:
            new.write_text(textwrap.dedent(text))
    return folder


def ask(server: InferenceServer, model: str, *, version: int = -1, **arrays: Any) -> InferenceResponse:
    """The one response of a model to float32 arrays; AssertionError if there are more."""
    responses = ask_all(server, model, version=version, **arrays)
    assert len(responses) == 1
    return responses[0]


def ask_all(
    server: InferenceServer, model: str, *, version: int = -1, **arrays: Any
) -> list[InferenceResponse]:
    """Every response of a model to float32 arrays."""
    arrived: queue.SimpleQueue[tuple[InferenceResponse | None, bool]] = queue.SimpleQueue()
    inputs = {name: Tensor(name, np.asarray(array, np.float32)) for name, array in arrays.items()}
    request = InferenceRequest(model_name=model, model_version=version, inputs=inputs)
    inference = Inference(request=request, on_response=lambda response, final: arrived.put((response, final)))
    server.submit(inference)
    responses: list[InferenceResponse] = []
    while True:
        response, final = arrived.get(timeout=30)
        if response is not None:
            responses.append(response)
        if final:
            return responses


def value(response: InferenceResponse, name: str = "Y") -> list[float]:
    """Return the values of an output; raise the error of a response that failed."""
    if response.error is not None:
        raise response.error
    output = response.output(name)
    assert output is not None
    return output.array.tolist()
