import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Doubles X by two concurrent calls of identity_fp32."""

    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "X")
        responses = await asyncio.gather(self.call(tensor).async_exec(), self.call(tensor).async_exec())
        total = sum(pb_utils.get_output_tensor_by_name(response, "Y").as_numpy() for response in responses)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", total)])

    def call(self, tensor):
        return pb_utils.InferenceRequest(
            model_name="identity_fp32", requested_output_names=["Y"], inputs=[tensor]
        )
