import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Each request learns the widths of all requests of its batch."""

    def execute(self, requests):
        sleeps = [pb_utils.get_input_tensor_by_name(request, "SLEEP_MS").as_numpy() for request in requests]
        time.sleep(max(int(sleep.max()) for sleep in sleeps) / 1000)
        widths = np.array([[sleep.shape[1] for sleep in sleeps]], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("WIDTHS", widths)]) for _ in requests]
