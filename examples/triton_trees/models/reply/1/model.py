"""Asks the trees how likely a customer is to leave, and lets a text model write a first reply to those who may."""

import numpy as np
import triton_python_backend_utils as pb_utils

TEXT_MODEL = "smollm2"
PROMPT = (
    "<|im_start|>system\nYou are a support agent. You say sorry to customers, in one sentence.<|im_end|>\n"
    "<|im_start|>user\n{ticket}<|im_end|>\n<|im_start|>assistant\n"
)


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        features = pb_utils.get_input_tensor_by_name(request, "FEATURES").as_numpy()
        tickets = pb_utils.get_input_tensor_by_name(request, "TICKET").as_numpy()
        [probabilities] = call("risk", "probabilities", X=features)
        risks = probabilities[:, 1:]
        replies = [
            self.reply(ticket.decode()) if risk >= 0.5 else ""
            for [ticket], [risk] in zip(tickets, risks, strict=True)
        ]
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("RISK", risks), pb_utils.Tensor("REPLY", np.array([replies], dtype=object).T)]
        )

    def reply(self, ticket):
        text = np.array([[PROMPT.format(ticket=ticket).encode()]], dtype=object)
        pieces = call(TEXT_MODEL, "text_output", text_input=text, max_tokens=np.array([[48]], np.int32))
        return b"".join(piece.item() for piece in pieces).decode().strip()


def call(model, output, **inputs):
    """Call a model of the repository, and return the output of each response, of which a text model may send several."""
    request = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=[output],
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
    )
    found = []
    for response in request.exec(decoupled=True):
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        tensor = pb_utils.get_output_tensor_by_name(response, output)
        if tensor is not None:      # the last response of a text model may be empty
            found.append(tensor.as_numpy())
    return found
