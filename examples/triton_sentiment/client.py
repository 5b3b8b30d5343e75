"""Sends twenty texts at the same time, which the server batches."""

import os
from concurrent.futures import ThreadPoolExecutor

import requests

URL = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000")


def sentiment(text):
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [text]}]}
    answer = requests.post(f"{URL}/v2/models/sentiment/infer", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()["outputs"][0]["data"][0]


texts = [f"我 爱 你 {word}" for word in "美丽的中国好坏房间" * 2]
with ThreadPoolExecutor(20) as threads:
    for text, label in zip(texts, threads.map(sentiment, texts), strict=True):
        print(text, label)
