import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        self.args = dict(args)
        self.args["model_config"] = type(args["model_config"]).__name__
        self.args["model_repository"] = Path(args["model_repository"]).name
        self.args["model_dir"] = Path(pb_utils.get_model_dir()).name

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        told = {
            "id": request.request_id(),
            "correlation": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "parameters": json.loads(request.parameters()),
            "outputs": sorted(request.requested_output_names()),
            "shape": pb_utils.get_input_tensor_by_name(request, "X").shape(),
            "cancelled": request.is_cancelled(),
        }
        config = {
            "parameters": self.config["parameters"],
            "input": pb_utils.get_input_config_by_name(self.config, "X"),
            "output": pb_utils.get_output_config_by_name(self.config, "NONE"),
            "decoupled": pb_utils.using_decoupled_model_transaction_policy(self.config),
        }
        return pb_utils.InferenceResponse(
            [
                self.tensor("REQUEST", told, request),
                self.tensor("ARGS", self.args, request),
                self.tensor("CONFIG", config, request),
            ]
        )

    def tensor(self, name, value, request):
        rows = len(pb_utils.get_input_tensor_by_name(request, "X").as_numpy())
        return pb_utils.Tensor(name, np.full((rows, 1), json.dumps(value, sort_keys=True), np.object_))
