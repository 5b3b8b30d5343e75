import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        word = pb_utils.get_input_tensor_by_name(request, "MODE").as_numpy()[0].decode()
        ones = np.ones(2, np.float32)
        return pb_utils.InferenceResponse(
            {
                "type": [pb_utils.Tensor("Y", np.ones(2, np.int64))],
                "shape": [pb_utils.Tensor("Y", np.ones((3, 1), np.float32))],
                "missing": [pb_utils.Tensor("Z", ones)],
                "undeclared": [pb_utils.Tensor("Y", ones), pb_utils.Tensor("EXTRA", ones)],
                "nothing": [],
                "nan": [pb_utils.Tensor("Y", np.array([np.nan, np.inf], np.float32))],
                "zero_size": [pb_utils.Tensor("Y", np.ones((0, 2), np.float32))],
                "scalar": [pb_utils.Tensor("Y", np.array(1.5, np.float32))],
            }[word]
        )
