import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for index in range(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0]):
                tensor = pb_utils.Tensor("INDEX", np.array([index], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
        raise ValueError("after the responses")
