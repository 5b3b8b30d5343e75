"""A small server of models written in the test: real instances, schedulers and configs."""

from __future__ import annotations

import textwrap
import threading
from pathlib import Path

import numpy as np
from google.protobuf import text_format

from genserve.backends.backend import ModelSource
from genserve.backends.python.python_backend import PythonBackend
from genserve.batching.model_instance import ModelInstances, group_placements
from genserve.batching.queue_scheduler import make_scheduler
from genserve.config.normalise import normalise
from genserve.config.schema import model_config, new_model_config
from genserve.errors import InferenceError, Status
from genserve.generation_metrics import Metrics
from genserve.inference import Inference, InferenceRequest
from genserve.inference_statistics import ModelStatistics
from genserve.repository.request_validation import decoupled_error
from genserve.tensor import Tensor

DECOUPLED = "model_transaction_policy { decoupled: true }"
HEADER = """\
import triton_python_backend_utils as pb_utils
import numpy as np
import asyncio, json, threading, time


def tensor(request, name="X"):
    return pb_utils.get_input_tensor_by_name(request, name)


def answer(array, name="Y"):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array)])


def ask(model, *tensors, outputs=("Y",), **fields):
    return pb_utils.InferenceRequest(
        model_name=model, inputs=list(tensors), requested_output_names=list(outputs), **fields
    )

"""


def declared(*names):
    """The outputs of a config; their type is not checked."""
    return "".join(f"\noutput {{ name: '{name}' data_type: TYPE_FP32 dims: [ -1 ] }}" for name in names)


class Answer:
    """The responses to a request; waits for its end."""

    def __init__(self):
        self.responses = []
        self.ended = threading.Event()

    def receive(self, response, final):
        if response is not None:
            self.responses.append(response)
        if final:
            self.ended.set()

    def wait(self):
        assert self.ended.wait(20), "the request has not ended"
        return self

    @property
    def error(self):
        self.wait()
        return self.responses[-1].error if self.responses else None

    @property
    def arrays(self):
        """The first output of each response."""
        assert self.error is None, self.error
        return [response.outputs[0].array for response in self.wait().responses if response.outputs]

    @property
    def array(self):
        [array] = self.arrays
        return array


class Models:
    """A server of python models; the `InferenceServer` protocol."""

    def __init__(self, root: Path):
        self.root = root
        self.metrics = Metrics()
        self._models = {}
        self.configs = {}
        self.loaded = []
        self.exit_timeout_s = 30

    def write(self, name, source, config="", **files):
        """Write a model's files; paths are relative to the folder of the version.

        A config without outputs gets the output Y, since undeclared outputs are not returned.
        """
        if "output" not in config:
            config += declared("Y")
        folder = self.root / name / "1"
        folder.mkdir(parents=True, exist_ok=True)
        (self.root / name / "config.pbtxt").write_text(f'backend: "python"\n{config}')
        (folder / "model.py").write_text(HEADER + textwrap.dedent(source))
        for path, text in files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        return folder

    def add(self, name, source, config="", **files):
        self.write(name, source, config, **files)
        self.start(name)

    def start(self, name, backend=PythonBackend):
        message = text_format.Parse((self.root / name / "config.pbtxt").read_text(), new_model_config())
        message.name = name
        backend.auto_complete(message, path=self.root / name, version=1, default_max_batch_size=4)
        normalise(message, model_folder=self.root / name, gpus=0)
        config = model_config(message, name=name)
        source = ModelSource(
            config=config,
            version=1,
            path=self.root / name,
            folder=self.root / name / "1",
            server=self,
            metrics=self.metrics,
        )
        shared = backend.load(source)
        places = tuple(place for group in config.instance_groups for place in group_placements(group))
        instances = ModelInstances(
            lambda placement: backend(source, shared, placement),
            placements=places,
            scheduler=make_scheduler(config, num_instances=len(places), path=self.root / name),
            statistics=ModelStatistics(),
            exit_timeout_s=self.exit_timeout_s,
        )
        self._models[name], self.configs[name] = instances, config

    def stop(self, name):
        self._models.pop(name).close()

    def close(self):
        while self._models:
            self.stop(next(iter(self._models)))

    def infer(self, model, *arrays, **request):
        """Call a model; arrays are inputs X, X1, X2..., or the inputs in `inputs`."""
        names = ["X", *(f"X{number}" for number in range(1, len(arrays)))][: len(arrays)]
        inputs = {name: Tensor(name, array) for name, array in zip(names, arrays, strict=True)}
        inputs |= request.pop("inputs", {})
        answer = Answer()
        asked = InferenceRequest(model_name=model, inputs=inputs, **request)
        answer.inference = Inference(request=asked, on_response=answer.receive)
        self.submit(answer.inference)
        return answer

    def instances(self, name):
        return self._models[name]

    def submit(self, inference):
        name = inference.request.model_name
        model = self._find(name, inference.request.model_version)
        if self.configs[name].decoupled and not inference.takes_stream:
            raise decoupled_error(name)
        inference.accept(model_version=1, batch_size=1)
        model.submit(inference)

    def load(self, name, *, config="", files=None):
        if name not in self._models:
            raise InferenceError(f"failed to load '{name}', failed to poll from model repository")
        self.loaded.append((name, config, files))

    def unload(self, name, *, dependents=False):
        self.loaded.append((name, dependents))

    def is_ready(self, name, version=-1):
        return name in self._models and version in (-1, 1) and self._models[name].ready

    def _find(self, name, version):
        if name not in self._models or version not in (-1, 1):
            raise InferenceError(f"Request for unknown model: '{name}' is not found", status=Status.NOT_FOUND)
        return self._models[name]


def floats(*values):
    return np.array(values, np.float32)
