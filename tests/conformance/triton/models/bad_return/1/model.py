import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        mode = pb_utils.get_input_tensor_by_name(requests[0], "MODE")
        good = pb_utils.InferenceResponse([pb_utils.Tensor("Y", mode.as_numpy())])
        word = mode.as_numpy()[0].decode()
        if word == "raise_deep":
            self.raise_deep()
        return {"string": "done", "empty": [], "two": [good, good], "integer": [1], "tuple": (good,)}[word]

    def raise_deep(self):
        raise KeyError("deep")
