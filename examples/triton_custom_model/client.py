"""Asks the network, and the Python model that calls it."""

import os

import requests

URL = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000")
BODY = {
    "inputs": [{"name": "input__0", "shape": [1, 2], "datatype": "INT64", "data": [[1, 2]]}],
    "outputs": [{"name": "output__0"}, {"name": "output__1"}],
}

for model in ("fc_model_pt", "custom_model"):
    answer = requests.post(f"{URL}/v2/models/{model}/versions/1/infer", json=BODY, timeout=60)
    answer.raise_for_status()
    for output in answer.json()["outputs"]:
        print(model, output["name"], output["shape"], output["data"][:4])
