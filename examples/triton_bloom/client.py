"""Generates greedily in the client: one request for the token ids, one per token for the logits."""

import os

import numpy as np
import tritonclient.grpc as triton

HOST = os.environ.get("GENSERVE_GRPC", "127.0.0.1:8001")


def int64(name, array):
    tensor = triton.InferInput(name, array.shape, "INT64")
    tensor.set_data_from_numpy(array)
    return tensor


with triton.InferenceServerClient(HOST) as client:
    text = triton.InferInput("TEXT", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"hello world triton"], dtype=object))
    ids = client.infer("bloom_3b_tokenizer", [text]).as_numpy("input_ids")
    for _ in range(8):
        inputs = [int64("input_ids", ids), int64("attention_mask", np.ones_like(ids))]
        logits = client.infer("bloom_3b", inputs).as_numpy("logits")
        ids = np.append(ids, logits[:, -1:].argmax(axis=-1), axis=1)
    print(ids)
