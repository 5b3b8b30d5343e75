"""huggingface_hub's InferenceClient: TGI's text generation with its tokens, and OpenAI's chats."""

import os

from huggingface_hub import InferenceClient

URL = os.environ.get("GENSERVE_URL", "http://127.0.0.1:8000")

with InferenceClient(model=URL) as client:
    for token in client.text_generation("The sea is", max_new_tokens=16, stream=True):
        print(token, end="", flush=True)
    print()

    answer = client.text_generation("The sea is", max_new_tokens=4, details=True, seed=1, do_sample=True)
    print([(token.text, round(token.logprob, 2)) for token in answer.details.tokens])

    question = {"role": "user", "content": "What is the capital of Japan?"}
    print(client.chat_completion([question], max_tokens=32, temperature=0).choices[0].message.content)
