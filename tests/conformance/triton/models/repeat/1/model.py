import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request)

    def answer(self, request):
        count = self.value(request, "N", 0)
        error_at = self.value(request, "ERROR_AT", -1)
        final_apart = bool(self.value(request, "FINAL_APART", count == 0))
        sender = request.get_response_sender()
        for index in range(count):
            last = index == count - 1 and not final_apart
            sender.send(self.response(index, error_at), flags=FINAL if last else 0)
        if final_apart:
            sender.send(flags=FINAL)

    def response(self, index, error_at):
        if index == error_at:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"no response {index}", pb_utils.TritonError.UNAVAILABLE)
            )
        return pb_utils.InferenceResponse([pb_utils.Tensor("INDEX", np.array([index], np.int32))])

    def value(self, request, name, default):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return default if tensor is None else tensor.as_numpy()[0]
