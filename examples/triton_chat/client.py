"""Asks the chat: its BLS loop generates a whole answer, with the confidence of each token."""

import os

import numpy as np
import tritonclient.http as triton

HOST = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000").removeprefix("http://")
SPEAKER = 13086


def tensor(name, ids):
    array = np.array([ids], dtype=np.int64)
    made = triton.InferInput(name, array.shape, "INT64")
    made.set_data_from_numpy(array)
    return made


ids = [SPEAKER, 5, 6, 7]
with triton.InferenceServerClient(HOST) as client:
    inputs = [tensor("INPUT__0", ids), tensor("INPUT__1", [1] * len(ids)), tensor("INPUT__2", ids)]
    answer = client.infer("ibuddha_chitchat_bls", inputs)
    print("tokens     ", answer.as_numpy("OUTPUT__0"))
    print("confidences", answer.as_numpy("OUTPUT__1").round(4))
