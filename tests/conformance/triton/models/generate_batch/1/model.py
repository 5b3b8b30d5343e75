import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        prompt = pb_utils.get_input_tensor_by_name(request, "PROMPT").as_numpy()
        if prompt.flat[0] == b"missing":
            error = pb_utils.TritonError("nothing here", pb_utils.TritonError.NOT_FOUND)
            return pb_utils.InferenceResponse(error=error)
        grid = pb_utils.get_input_tensor_by_name(request, "GRID")
        shape = [] if grid is None else list(grid.shape())
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("TEXT", prompt),
                pb_utils.Tensor("SHAPE", np.array([shape] * len(prompt), np.int64)),
                pb_utils.Tensor("SCORE", np.full((len(prompt), 1), 0.5)),
            ]
        )
