"""genserve's SDK without a server: a model of the store in this process."""

from genserve import LLM

with LLM("smollm2") as llm:
    print(llm.chat("What is the capital of Japan?", max_tokens=32).text)
    for answer in llm.complete(["Two and two is", "The sea is"], n=2, temperature=1, max_tokens=8):
        print(answer.text)
