import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model without config.pbtxt: it says itself what it takes and gives."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_input({"name": "SCALE", "data_type": "TYPE_FP32", "dims": [1], "optional": True})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        y = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        scale = pb_utils.get_input_tensor_by_name(request, "SCALE")
        if scale is not None:
            y = y * scale.as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])
