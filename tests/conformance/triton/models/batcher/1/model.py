import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Each request learns how many requests and rows its batch had."""

    def execute(self, requests):
        sleeps = [pb_utils.get_input_tensor_by_name(request, "SLEEP_MS").as_numpy() for request in requests]
        time.sleep(max(int(sleep.max()) for sleep in sleeps) / 1000)
        rows = sum(len(sleep) for sleep in sleeps)
        return [self.answer(len(sleep), len(requests), rows) for sleep in sleeps]

    def answer(self, own_rows, requests, rows):
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("REQUESTS", np.full((own_rows, 1), requests, np.int32)),
                pb_utils.Tensor("ROWS", np.full((own_rows, 1), rows, np.int32)),
            ]
        )
