import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        call = pb_utils.InferenceRequest(
            model_name="pass",
            requested_output_names=["Y"],
            inputs=[pb_utils.Tensor("X", np.ones(1, np.int32))],
        )
        try:
            call.exec()
        except pb_utils.TritonModelException as error:
            self.refusal = str(error)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        name = pb_utils.get_input_tensor_by_name(request, "MODEL").as_numpy()[0].decode()
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("REFUSAL", np.array([self.refusal], np.object_)),
                pb_utils.Tensor("READY", np.array([pb_utils.is_model_ready(name)])),
            ]
        )
