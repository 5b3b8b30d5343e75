import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.count = 0

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        rows = len(pb_utils.get_input_tensor_by_name(request, "X").as_numpy())
        self.count += 1
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("COUNT", np.full((rows, 1), self.count, np.int32))]
        )
