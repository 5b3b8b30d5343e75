import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """The word "fail" is an error; the word "two" is two elements of one response."""

    def execute(self, requests):
        for request in requests:
            self.answer(request)

    def answer(self, request):
        sender = request.get_response_sender()
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
        limit = pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy()[0]
        stream = pb_utils.get_input_tensor_by_name(request, "stream")
        words = text.split()[:limit]
        pieces = words if stream is not None and stream.as_numpy()[0] else [" ".join(words)]
        for piece in pieces:
            sender.send(self.response(piece, request))
        sender.send(flags=FINAL)

    def response(self, piece, request):
        if piece == "fail":
            error = pb_utils.TritonError("a word I do not say", pb_utils.TritonError.UNAVAILABLE)
            return pb_utils.InferenceResponse(error=error)
        texts = ["two", "words"] if piece == "two" else [piece]
        seen = json.dumps(json.loads(request.parameters()), sort_keys=True)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("text_output", np.array(texts, np.object_)),
                pb_utils.Tensor("parameters_seen", np.array([seen], np.object_)),
            ]
        )
