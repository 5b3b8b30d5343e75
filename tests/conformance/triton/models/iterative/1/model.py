import numpy as np
import triton_python_backend_utils as pb_utils

START = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
RESCHEDULE = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            self.step(request)

    def step(self, request):
        sequence = request.correlation_id()
        count = pb_utils.get_input_tensor_by_name(request, "N").as_numpy().item()
        if request.flags() & START:
            self.left[sequence] = count
        self.left[sequence] -= 1
        index = count - self.left[sequence] - 1
        last = self.left[sequence] == 0
        request.get_response_sender().send(
            self.response(index, request.flags()), flags=FINAL if last else 0
        )
        if last:
            del self.left[sequence]
        else:
            request.set_release_flags(RESCHEDULE)

    def response(self, index, flags):
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("INDEX", np.array([[index]], np.int32)),
                pb_utils.Tensor("FLAGS", np.array([[flags]], np.int32)),
            ]
        )
