import os

import triton_python_backend_utils as pb_utils

LEAK_BYTES = 4096


class TritonPythonModel:
    """Returns its input, and leaks memory with each request."""

    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        self.kept.append(os.urandom(LEAK_BYTES))
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])
