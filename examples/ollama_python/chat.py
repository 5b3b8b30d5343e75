"""Ollama's Python library: a streamed chat, and JSON that matches a schema."""

import os

import ollama

URL = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
}

client = ollama.Client(URL)
question = {"role": "user", "content": "What is the capital of Japan?"}
for part in client.chat("smollm2", [question], stream=True, options={"num_predict": 32, "temperature": 0}):
    print(part.message.content, end="", flush=True)
print()

question = {"role": "user", "content": "Name a city in Italy."}
answer = client.chat("smollm2", [question], format=CITY, options={"num_predict": 100, "temperature": 0})
print(answer.message.content)
