import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensor = pb_utils.Tensor("INDEX", np.array([0], np.int32))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
