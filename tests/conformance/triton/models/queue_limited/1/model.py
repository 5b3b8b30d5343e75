import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        sleep = pb_utils.get_input_tensor_by_name(request, "SLEEP_MS").as_numpy()
        time.sleep(int(sleep.max()) / 1000)
        return pb_utils.InferenceResponse([pb_utils.Tensor("COUNT", np.ones((1, 1), np.int32))])
