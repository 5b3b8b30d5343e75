import numpy as np
import triton_python_backend_utils as pb_utils

CONTROLS = ("START", "END", "READY", "CORRID")


class TritonPythonModel:
    """The sum of the sequence so far, and the controls as they came."""

    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        controls = [pb_utils.get_input_tensor_by_name(request, name).as_numpy().item() for name in CONTROLS]
        start, _, ready, corrid = controls
        if ready:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().item()
            self.totals[corrid] = x if start else self.totals[corrid] + x
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("TOTAL", np.array([[self.totals.get(corrid, 0)]], np.int32)),
                pb_utils.Tensor("CONTROLS", np.array([controls], np.int32)),
            ]
        )
