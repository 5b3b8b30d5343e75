import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        sender = request.get_response_sender()
        word = pb_utils.get_input_tensor_by_name(request, "MODE").as_numpy()[0].decode()
        if word == "once":
            sender.send(self.response("sent"), flags=FINAL)
        elif word == "final_apart":
            sender.send(self.response("sent"))
            sender.send(flags=FINAL)
        elif word == "error":
            error = pb_utils.TritonError("sent", pb_utils.TritonError.NOT_FOUND)
            sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
        else:
            return self.response(self.complaint(sender, word))
        return None

    def complaint(self, sender, word):
        """What a wrong call of the sender raises."""
        calls = {
            "bad_flag": lambda: sender.send(self.response("sent"), flags=9),
            "no_response": lambda: sender.send(),
            "only_final": lambda: sender.send(flags=FINAL),
        }
        try:
            calls[word]()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no complaint"

    def response(self, text):
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([text], np.object_))])
