"""The first question of the documentation and of the chat page, which the default model answers rightly."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from genserve import LLM
from genserve.prompt import Message
from genserve.sampling.defaults import chat_sampling_params

ROOT = Path(__file__).parents[2]
CAPITALS = {"Japan": "Tokyo"}
QUESTION = re.compile(r'"What is the capital of (\w+)\?"')
SEEDS = range(1, 17)


def first_country(path: str) -> str:
    found = QUESTION.search((ROOT / path).read_text(encoding="utf-8"))
    assert found, f"{path} asks for no capital"
    return found[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_default_model_answers_it_with_the_defaults_of_a_chat(smollm2_repository: Path) -> None:
    country = first_country("README.md")
    assert {first_country(path) for path in ("docs/quick_start.md", "web/src/view/thread.tsx")} == {country}
    messages = [Message(role="user", content=f"What is the capital of {country}?")]
    with LLM(model_repository=smollm2_repository) as llm, ThreadPoolExecutor(8) as pool:
        options = {**chat_sampling_params(llm.default_sampling_params), "max_tokens": 128}
        answers = list(pool.map(lambda seed: llm.chat(messages, **options, seed=seed).text, SEEDS))
    wrong = [answer for answer in answers if CAPITALS[country] not in answer]
    assert len(wrong) <= 1, wrong
