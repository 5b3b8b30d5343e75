"""genserve's SDK: eight prompts from eight threads share the steps of the model."""

import os
from concurrent.futures import ThreadPoolExecutor

from genserve import Client

URL = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000")
CITIES = ("Paris", "Rome", "Berlin", "Madrid", "Lisbon", "Vienna", "Oslo", "Athens")

with Client(URL) as client, ThreadPoolExecutor(len(CITIES)) as threads:
    questions = [f"In which country is {city}?" for city in CITIES]
    for answer in threads.map(lambda question: client.chat(question, max_tokens=16), questions):
        print(answer.text)
