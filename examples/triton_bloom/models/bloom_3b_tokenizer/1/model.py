import os

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = AutoTokenizer.from_pretrained(os.path.join(args["model_repository"], "1"))

    def execute(self, requests):
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            tokens = self.tokenizer([text.decode("utf-8") for text in texts], padding=True, return_tensors="np")
            responses.append(
                pb_utils.InferenceResponse(
                    output_tensors=[
                        pb_utils.Tensor(name, tokens[name].astype(np.int64))
                        for name in ("input_ids", "attention_mask")
                    ]
                )
            )
        return responses
