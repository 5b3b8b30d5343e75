import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        actions = {
            "load": pb_utils.load_model,
            "unload": pb_utils.unload_model,
            "ready": pb_utils.is_model_ready,
        }
        action, model = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0].decode()
            for name in ("ACTION", "MODEL")
        )
        try:
            said = repr(actions[action](model_name=model))
        except pb_utils.TritonModelException as error:
            said = f"error: {error}"
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([said], np.object_))])
