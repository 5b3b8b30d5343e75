"""Stands in for Triton's sequence backend: each slot of the batch adds up the INPUTs of its sequence."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A request's index in the batch is its slot; a slot that is not READY keeps its sum."""

    def initialize(self, args):
        """Read `execute_delay_ms`, and make room for the slots."""
        config = json.loads(args["model_config"])
        delay = config.get("parameters", {}).get("execute_delay_ms", {"string_value": "0"})
        self.delay_s = int(delay["string_value"]) / 1000
        self.sums = [0] * max(1, config["max_batch_size"])

    def execute(self, requests):
        """Return one sum for each element of an INPUT."""
        time.sleep(self.delay_s)
        return [self.answer(slot, request) for slot, request in enumerate(requests)]

    def answer(self, slot, request):
        """Add the INPUT of a request to the sum of its slot, or reset the sum at START."""
        names = ("START", "READY", "INPUT")
        start, ready, values = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in names
        )
        if not ready.any():
            return pb_utils.InferenceResponse([])
        self.sums[slot] = int(values.sum()) + (0 if start.any() else self.sums[slot])
        output = np.full(values.shape, self.sums[slot], dtype=np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)])
