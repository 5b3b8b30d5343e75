import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The sum of the sequence so far; who it is, by the accessors of the request."""

    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        sequence, flags = request.correlation_id(), request.flags()
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy().item()
        start = flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        self.totals[sequence] = x if start else self.totals[sequence] + x
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("TOTAL", np.array([[self.totals[sequence]]], np.int32)),
                pb_utils.Tensor("CORRELATION", np.array([[repr(sequence)]], np.object_)),
                pb_utils.Tensor("FLAGS", np.array([[flags]], np.int32)),
            ]
        )
