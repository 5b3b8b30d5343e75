"""Triton's Python client over HTTP: the models, and the token ids of the tokenizer stage."""

import os

import numpy as np
import tritonclient.http as triton

HOST = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000").removeprefix("http://")

text = triton.InferInput("text_input", [1, 1], "BYTES")
text.set_data_from_numpy(np.array([[b"The sea is"]], dtype=object))

with triton.InferenceServerClient(HOST) as client:
    for model in client.get_model_repository_index():
        print(model["name"], model["state"])
    print(client.infer("smollm2_tokenizer", [text]).as_numpy("input_ids"))
