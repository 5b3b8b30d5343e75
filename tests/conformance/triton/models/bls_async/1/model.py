import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        count = pb_utils.get_input_tensor_by_name(request, "N").as_numpy()
        calls = [self.call("pass", "X", "Y", count + step) for step in range(3)]
        passed = await asyncio.gather(*(call.async_exec() for call in calls))
        iterator = await self.call("repeat", "N", "INDEX", count).async_exec(decoupled=True)
        repeated = [[tensor.as_numpy()[0] for tensor in response.output_tensors()] for response in iterator]
        numbers = [number for response in repeated for number in response]
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("PASSED", np.concatenate([self.only(response) for response in passed])),
                pb_utils.Tensor("REPEATED", np.array(numbers, np.int32)),
                pb_utils.Tensor("EMPTY", np.array([repeated.count([])], np.int32)),
            ]
        )

    def call(self, model, input_name, output_name, value):
        return pb_utils.InferenceRequest(
            model_name=model,
            requested_output_names=[output_name],
            inputs=[pb_utils.Tensor(input_name, value.astype(np.int32))],
        )

    def only(self, response):
        return response.output_tensors()[0].as_numpy()
