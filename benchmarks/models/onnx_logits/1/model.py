import json
import sys

import numpy as np
import triton_python_backend_utils as pb_utils

BLOCK_SIZE = 16


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        sys.path.append(parameters["site_packages"]["string_value"])
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # Otherwise the workers would spin on the cores that the next call needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.register_custom_ops_library(parameters["kernels"]["string_value"])
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
        """Return logits [batch, vocabulary] for ids [batch, length], which are computed without a cache."""
        batch, length = ids.shape
        width = -(-length // BLOCK_SIZE)
        inputs = {
            "input_ids": ids.reshape(-1),
            "position_ids": np.tile(np.arange(length), batch),
            "cumulative_sequence_length": np.arange(0, (batch + 1) * length, length, dtype=np.int32),
            "past_seqlens": np.zeros(batch, dtype=np.int32),
            "block_table": np.arange(batch * width, dtype=np.int32).reshape(batch, width),
            "logits_indices": np.arange(1, batch + 1) * length - 1,
            "attention_metadata": np.array([length, length], dtype=np.int32),
        }
        binding = self.session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for past in self.past:
            cache = np.zeros((batch * width, BLOCK_SIZE, *past.shape[2:]), dtype=np.float16)
            place = ("cpu", 0, np.float16, cache.shape, cache.ctypes.data)
            binding.bind_input(past.name, *place)
            binding.bind_output(past.name.replace("past_key_values", "present"), *place)
            inputs[past.name] = cache   # keeps the cache alive until the run has ended
        binding.bind_output("logits", "cpu")
        self.session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()[-1]
