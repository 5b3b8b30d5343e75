import json

import numpy as np
import triton_python_backend_utils as pb_utils

CODES = (
    "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG",
    "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED",
)  # fmt: skip


class TritonPythonModel:
    """MODE is "once" or "decoupled"; VALUE is JSON: {"inputs": {name: [dtype, shape, data]}, ...}."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        model, mode, value = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0].decode()
            for name in ("MODEL", "MODE", "VALUE")
        )
        call = self.call(model, json.loads(value))
        if mode == "decoupled":
            said = [self.describe(response) for response in call.exec(decoupled=True)]
        else:
            said = [self.describe(call.exec())]
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array(said, np.object_))])

    def call(self, model, value):
        inputs = value.pop("inputs")
        return pb_utils.InferenceRequest(
            model_name=model,
            requested_output_names=value.pop("outputs", []),
            inputs=[
                pb_utils.Tensor(name, np.array(data, np.dtype(dtype)).reshape(shape))
                for name, (dtype, shape, data) in inputs.items()
            ],
            **value,
        )

    def describe(self, response):
        if response.has_error():
            code = response.error().code()
            name = next(name for name in CODES if getattr(pb_utils.TritonError, name) == code)
            return f"{name}: {response.error().message()}"
        tensors = {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}
        return json.dumps(tensors, default=lambda item: item.decode())
