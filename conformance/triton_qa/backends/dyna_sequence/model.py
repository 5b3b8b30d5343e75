"""Stands in for Triton's dyna_sequence backend: adds up the INPUTs of each CORRID."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Keeps a sum for each correlation id; a batch must not have two requests with the same id."""

    def initialize(self, args):
        """Read `execute_delay_ms`."""
        config = json.loads(args["model_config"])
        delay = config.get("parameters", {}).get("execute_delay_ms", {"string_value": "0"})
        self.delay_s = int(delay["string_value"]) / 1000
        self.sums = {}

    def execute(self, requests):
        """Return one sum for each element of an INPUT."""
        time.sleep(self.delay_s)
        seen = set()
        return [self.answer(request, seen) for request in requests]

    def answer(self, request, seen):
        """Add the INPUT of a request to the sum of its sequence, and at its END the CORRID too."""
        names = ("START", "END", "READY", "CORRID", "INPUT")
        start, end, ready, corrid, values = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in names
        )
        sequence = int(corrid.flat[0])
        if sequence in seen:
            message = "the batch contains several requests of the same correlation id"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))
        seen.add(sequence)
        if not ready.any():
            return pb_utils.InferenceResponse([])
        total = int(values.sum()) + (0 if start.any() else self.sums.get(sequence, 0))
        self.sums[sequence] = total = total + (sequence if end.any() else 0)
        if end.any():
            del self.sums[sequence]
        output = np.full(values.shape, total, dtype=np.int64).astype(np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)])
