import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        sleeps = [pb_utils.get_input_tensor_by_name(request, "SLEEP_MS").as_numpy() for request in requests]
        time.sleep(max(int(sleep.max()) for sleep in sleeps) / 1000)
        return [self.answer(len(sleep), len(requests)) for sleep in sleeps]

    def answer(self, own_rows, requests):
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("REQUESTS", np.full((own_rows, 1), requests, np.int32))]
        )
