import triton_python_backend_utils as pb_utils

CODES = (
    "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG",
    "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED",
)  # fmt: skip


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        mode = pb_utils.get_input_tensor_by_name(request, "MODE")
        word = mode.as_numpy()[0].decode()
        if word == "raise":
            raise ValueError("as it was told")
        if word == "model_exception":
            raise pb_utils.TritonModelException("as it was told")
        if word == "default":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no code given"))
        if word in CODES:
            error = pb_utils.TritonError(f"this is {word}", getattr(pb_utils.TritonError, word))
            return pb_utils.InferenceResponse(error=error)
        if word == "both":
            error = pb_utils.TritonError("the error wins")
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", mode.as_numpy())], error)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", mode.as_numpy())])
