import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Each request learns its turn, counted from the last request that slept."""

    def initialize(self, args):
        self.turn = 0

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        sleep_ms = int(pb_utils.get_input_tensor_by_name(request, "SLEEP_MS").as_numpy().max())
        self.turn = 0 if sleep_ms else self.turn + 1
        turn = np.full((1, 1), self.turn, np.int32)
        time.sleep(sleep_ms / 1000)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TURN", turn)])
