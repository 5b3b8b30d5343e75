import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A, plus B where there is one."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        y = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
        b = pb_utils.get_input_tensor_by_name(request, "B")
        if b is not None:
            y = y + b.as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])
