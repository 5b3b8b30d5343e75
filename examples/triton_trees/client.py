"""Sends two tickets: the trees say who may leave, and a text model writes a first reply to them."""

import os

import numpy as np
import tritonclient.http as triton

HOST = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000").removeprefix("http://")
# Hours of waiting, messages so far, tickets of the last year, and whether the customer pays.
TICKETS = {
    "How do I change my address?": [1, 1, 0, 1],
    "My order has not arrived, and nobody answers me!": [40, 6, 5, 1],
}

features = triton.InferInput("FEATURES", [len(TICKETS), 4], "FP32")
features.set_data_from_numpy(np.array(list(TICKETS.values()), dtype=np.float32))
tickets = triton.InferInput("TICKET", [len(TICKETS), 1], "BYTES")
tickets.set_data_from_numpy(np.array([[ticket.encode()] for ticket in TICKETS], dtype=object))

with triton.InferenceServerClient(HOST) as client:
    answer = client.infer("reply", [features, tickets])
for ticket, [risk], [reply] in zip(TICKETS, answer.as_numpy("RISK"), answer.as_numpy("REPLY"), strict=True):
    print(f"{risk:.0%} {ticket}\n    {reply.decode() or '(no reply yet)'}")
