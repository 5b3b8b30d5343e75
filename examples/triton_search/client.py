"""Asks for the vectors of two sentences, and compares them."""

import os

import numpy as np
import tritonclient.http as triton

HOST = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000").removeprefix("http://")
SENTENCES = np.array([[5, 6, 7, 8], [5, 6, 9, 0]])

inputs = []
for name, array in {
    "input_ids": SENTENCES,
    "attention_mask": SENTENCES > 0,
    "token_type_ids": np.zeros_like(SENTENCES),
}.items():
    tensor = triton.InferInput(name, SENTENCES.shape, "INT64")
    tensor.set_data_from_numpy(array.astype(np.int64))
    inputs.append(tensor)

with triton.InferenceServerClient(HOST) as client:
    first, second = client.infer("sps_sbert_onnx", inputs).as_numpy("vector")
print(first.shape, "cosine:", first @ second / np.linalg.norm(first) / np.linalg.norm(second))
