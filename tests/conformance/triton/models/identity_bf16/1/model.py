import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """numpy has no bfloat16, so the tensor passes by DLPack."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X")
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("Y", x.to_dlpack())])
