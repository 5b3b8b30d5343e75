import json
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        sys.path.append(parameters["site_packages"]["string_value"])
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # Without it the workers spin on the cores that the next call needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = parameters["model_path"]["string_value"]
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.past = [i for i in self.session.get_inputs() if i.name.startswith("past_key_values.")]

    def execute(self, requests):
        responses = []
        for request in requests:
            ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
            logits = self.forward(np.ascontiguousarray(ids, dtype=np.int64))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("logits", logits[:, np.newaxis])]))
        return responses

    def forward(self, ids):
        """[batch, length] to [batch, vocabulary], with an empty cache: the whole prompt, each time."""
        batch, length = ids.shape
        feeds = {
            "input_ids": ids,
            "seqlens_k": np.full(batch, length - 1, dtype=np.int32),
            "total_len": np.array(length, dtype=np.int32),
            "rows": np.arange(batch, dtype=np.int64) * length + length - 1,
        }
        for past in self.past:
            _, heads, _, head_dim = past.shape
            feeds[past.name] = np.zeros((batch, heads, length, head_dim), dtype=np.float32)
        return self.session.run(["logits"], feeds)[0]
