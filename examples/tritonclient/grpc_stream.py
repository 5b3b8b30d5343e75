"""Triton's Python client over gRPC: a text, streamed by ModelStreamInfer."""

import os
import queue

import numpy as np
import tritonclient.grpc as triton

HOST = os.environ.get("GENSERVE_GRPC", "127.0.0.1:8001")

prompt = triton.InferInput("text_input", [1, 1], "BYTES")
prompt.set_data_from_numpy(np.array([[b"The sea is"]], dtype=object))
stream = triton.InferInput("stream", [1, 1], "BOOL")
stream.set_data_from_numpy(np.array([[True]]))
max_tokens = triton.InferInput("max_tokens", [1, 1], "INT32")
max_tokens.set_data_from_numpy(np.array([[16]], dtype=np.int32))

responses = queue.SimpleQueue()
with triton.InferenceServerClient(HOST) as client:
    client.start_stream(lambda result, error: responses.put(error or result))
    client.async_stream_infer("smollm2", [prompt, stream, max_tokens], enable_empty_final_response=True)
    while True:
        response = responses.get()
        if isinstance(response, Exception):
            raise response
        if response.get_response().parameters["triton_final_response"].bool_param:
            break
        print(response.as_numpy("text_output").item().decode(), end="", flush=True)
    client.stop_stream()
print()
