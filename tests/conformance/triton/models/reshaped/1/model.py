import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        scalar = pb_utils.get_input_tensor_by_name(request, "SCALAR").as_numpy()
        rows = pb_utils.get_input_tensor_by_name(request, "ROWS").as_numpy()
        seen = np.array([[scalar.ndim, *rows.shape]] * len(rows), np.int64)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("SEEN", seen),
                pb_utils.Tensor("SCALAR_OUT", scalar),
                pb_utils.Tensor("ROWS_OUT", rows),
            ]
        )
