import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        count = np.array([len(request.inputs())], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("INPUTS", count)])
