import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.logits_model = parameters["logits_model"]["string_value"]

    def execute(self, requests):
        return [self.generate(request) for request in requests]

    def generate(self, request):
        input_ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
        max_tokens = int(pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy()[0])
        prompt_length = input_ids.shape[1]
        for _ in range(max_tokens):
            call = pb_utils.InferenceRequest(
                model_name=self.logits_model,
                requested_output_names=["logits"],
                inputs=[pb_utils.Tensor("input_ids", input_ids)],
            )
            response = call.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            logits = pb_utils.get_output_tensor_by_name(response, "logits").as_numpy()
            next_id = logits[:, -1].argmax(axis=-1)
            input_ids = np.concatenate([input_ids, next_id[:, np.newaxis]], axis=1)
        new_ids = input_ids[0, prompt_length:]
        return pb_utils.InferenceResponse([pb_utils.Tensor("output_ids", new_ids)])
