"""OpenAI's Python library: a streamed chat, an answer as a pydantic class, and the Responses API."""

import os

from openai import OpenAI
from pydantic import BaseModel, Field

URL = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000")
MODEL = "smollm2"


class City(BaseModel):
    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


with OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("GENSERVE_API_KEY", "none")) as client:
    question = {"role": "user", "content": "What is the capital of Japan?"}
    stream = client.chat.completions.create(
        model=MODEL, messages=[question], temperature=0, max_tokens=32, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    question = {"role": "user", "content": "Name a city in Italy."}
    answer = client.chat.completions.parse(
        model=MODEL, messages=[question], response_format=City, temperature=0, max_tokens=100
    )
    print(answer.choices[0].message.parsed)

    first = client.responses.create(model=MODEL, input="Name a river.", temperature=0, max_output_tokens=32)
    second = client.responses.create(
        model=MODEL, input="Where is it?", previous_response_id=first.id, temperature=0, max_output_tokens=32
    )
    print(second.output_text)
