"""Stands in for Triton's identity backend: OUTPUTn is INPUTn, after the delays that its parameters set."""

import json
import threading
import time
from collections import Counter

import triton_python_backend_utils as pb_utils

_instances, _lock = Counter(), threading.Lock()


class TritonPythonModel:
    """Leaves out an output whose input is missing or optional, as the original does."""

    def initialize(self, args):
        """Read `creation_delay_sec`, `execute_delay_ms` and `instance_wise_delay_multiplier`."""
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        time.sleep(int(parameters.get("creation_delay_sec", 0)))
        with _lock:
            index = _instances[args["model_name"]]
            _instances[args["model_name"]] += 1
        multiplier = int(parameters.get("instance_wise_delay_multiplier", 0)) * index
        self.delay_s = int(parameters.get("execute_delay_ms", 0)) / 1000 * max(1, multiplier)

    def execute(self, requests):
        """Wait, and return the inputs."""
        time.sleep(self.delay_s)
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Return the requested outputs, and the example parameters that the original sends."""
        tensors = {tensor.name().replace("INPUT", "OUTPUT", 1): tensor for tensor in request.inputs()}
        wanted = request.requested_output_names()
        outputs = [pb_utils.Tensor(name, tensors[name].as_numpy()) for name in wanted if name in tensors]
        # The original also sends a float, which a Python model cannot.
        parameters = {"param0": "an example string parameter", "param1": 42, "param2": False}
        return pb_utils.InferenceResponse(outputs, parameters=parameters)
