"""Beam search and best_of through every door of a running server, beside transformers' `generate`."""

from __future__ import annotations

import math

import httpx2
import numpy as np
import openai
import pytest
import torch

from genserve import LLM, Client
from genserve.errors import InvalidRequest
from tests.support.transformers_reference import reference_model

PROMPT = "hello there"
WIDTH = 3
BEAMS = {"use_beam_search": True, "beam_width": WIDTH, "length_penalty": 0.5, "ignore_eos": True}
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def tokenizer(tiny_server):
    return tiny_server.model.tokenizer


@pytest.fixture(scope="module")
def expected(tiny_checkpoint, tokenizer) -> list[list[int]]:
    """The two best beams of three, as transformers has them."""
    return searched(tiny_checkpoint, tokenizer.encode(PROMPT))


def searched(checkpoint, prompt: list[int]) -> list[list[int]]:
    ids = torch.tensor([prompt])
    rows = reference_model(checkpoint).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=WIDTH,
        num_return_sequences=2,
        length_penalty=0.5,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    return rows[:, len(prompt) :].tolist()


def test_completions_return_the_n_best_beams(client, expected, tokenizer):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, n=2, max_tokens=NUM_TOKENS, extra_body=BEAMS | {"return_token_ids": True}
    )
    assert [choice.token_ids for choice in answer.choices] == expected
    assert [choice.text for choice in answer.choices] == [tokenizer.decode(ids) for ids in expected]
    assert answer.usage.completion_tokens == 2 * NUM_TOKENS


def test_without_a_width_there_are_as_many_beams_as_answers(client):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "n": 2}
    of_n = client.completions.create(**options, extra_body=BEAMS | {"beam_width": None})
    of_two = client.completions.create(**options, extra_body=BEAMS | {"beam_width": 2})
    assert [choice.text for choice in of_n.choices] == [choice.text for choice in of_two.choices]


def test_each_of_several_prompts_has_its_own_search(client, tiny_checkpoint, tokenizer):
    prompts = [tokenizer.encode(text) for text in ("the quick brown fox", PROMPT)]
    answer = client.completions.create(
        model="tiny",
        prompt=prompts,
        n=2,
        max_tokens=NUM_TOKENS,
        extra_body=BEAMS | {"return_token_ids": True},
    )
    assert [choice.token_ids for choice in answer.choices] == [
        ids for prompt in prompts for ids in searched(tiny_checkpoint, prompt)
    ]


def test_a_stream_joins_to_the_whole_answer(client):
    options = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPT}],
        "n": 2,
        "max_tokens": 24,
        "extra_body": BEAMS,
    }
    whole = [choice.message.content for choice in client.chat.completions.create(**options).choices]
    texts = ["", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == whole


def test_log_probabilities_of_the_winning_beam_add_up_to_more_than_greedy_s(client):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "logprobs": 0}

    def total(**extra) -> float:
        answer = client.completions.create(**options, extra_body={"ignore_eos": True} | extra)
        return math.fsum(answer.choices[0].logprobs.token_logprobs)

    assert total(**BEAMS) > total(temperature=0)


def test_both_clients_and_the_dialect_of_tgi_search_too(tiny_server, tiny_repository, expected, tokenizer):
    text = tokenizer.decode(expected[0])
    with Client(tiny_server.url) as client:
        assert client.generate(PROMPT, max_tokens=NUM_TOKENS, **BEAMS).text == text
    with LLM(model_repository=tiny_repository) as llm:
        assert list(llm.generate(PROMPT, max_tokens=NUM_TOKENS, **BEAMS).token_ids) == expected[0]


def test_a_width_above_one_on_the_ensemble_is_a_search(tiny_server, tiny_repository):
    body = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "beam_width": WIDTH, "length_penalty": 0.5}
    url = f"{tiny_server.url}/v2/models/tiny/generate"
    plain = httpx2.post(url, json={"text_input": PROMPT, "max_tokens": NUM_TOKENS, "beam_width": 1}).json()
    found = httpx2.post(url, json=body).json()
    with LLM(model_repository=tiny_repository) as llm:
        options = {"max_tokens": NUM_TOKENS, "use_beam_search": True, "length_penalty": 0.5}
        assert found["text_output"] == llm.generate(PROMPT, **options, beam_width=WIDTH).text
        assert plain["text_output"] == llm.generate(PROMPT, max_tokens=NUM_TOKENS).text
    assert found != plain


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"extra_body": BEAMS, "n": 4}, "n"),
        ({"extra_body": BEAMS | {"beam_width": 1000}}, "beam_width"),
        ({"extra_body": BEAMS, "temperature": 0.7}, "temperature"),
        ({"extra_body": BEAMS, "top_p": 0.7}, "top_p"),
        ({"extra_body": BEAMS, "best_of": 3}, "best_of"),
        ({"extra_body": BEAMS, "echo": True, "logprobs": 1}, "echo"),
        ({"extra_body": BEAMS | {"early_stopping": "always"}}, "early_stopping"),
        ({"extra_body": {"beam_width": 3}}, "beam_width"),
        ({"extra_body": BEAMS | {"num_beam_groups": 2, "diversity_penalty": 0.5}}, "num_beam_groups"),
        ({"extra_body": BEAMS | {"num_beam_groups": 3}}, "diversity_penalty"),
        ({"extra_body": {"diversity_penalty": 0.5}}, "diversity_penalty"),
        ({"extra_body": {"length_penalty": 2.0}}, "length_penalty"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 100, "prompt": [[1]] * 100}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "temperature": 0}, "best_of"),
    ],
)
def test_a_contradiction_names_its_field(client, tiny_server, change, param):
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(**({"model": "tiny", "prompt": PROMPT} | change))
    assert raised.value.param == param
    assert tiny_server.model.engine.num_accepted == 0


def test_best_of_returns_the_likeliest_answers_of_n(client):
    """The seeds of n answers are the same whether all are returned or not."""
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "seed": 5, "logprobs": 0}
    options["extra_body"] = {"ignore_eos": True}
    drawn = client.completions.create(**options, n=5)
    best = client.completions.create(**options, n=2, best_of=5)
    by_mean = sorted(drawn.choices, key=lambda choice: -np.mean(choice.logprobs.token_logprobs))
    assert [choice.text for choice in best.choices] == [choice.text for choice in by_mean[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage.completion_tokens == drawn.usage.completion_tokens == 30
    assert best.usage.prompt_tokens == drawn.usage.prompt_tokens


def test_best_of_is_there_for_chats_for_tgi_and_for_both_clients(client, tiny_server, tiny_repository):
    options = {"max_tokens": 6, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    with LLM(model_repository=tiny_repository) as llm:
        drawn = [
            llm.generate(PROMPT, **options | {"seed": 5 + choice, "logprobs": True}) for choice in range(4)
        ]
        best = max(drawn, key=lambda completion: np.mean(completion.logprobs))
        assert llm.generate(PROMPT, **options, best_of=4).token_ids == best.token_ids
        with pytest.raises(InvalidRequest) as caught:
            llm.stream(PROMPT, **options, best_of=4)
        assert caught.value.field == "best_of"
        best_chat = llm.chat(PROMPT, **options, best_of=4)
    with Client(tiny_server.url) as sdk:
        assert sdk.generate(PROMPT, **options, best_of=4).text == best.text
        assert sdk.chat(PROMPT, **options, best_of=4) == best_chat
    parameters = {"do_sample": True, "max_new_tokens": 6, "seed": 5, "ignore_eos": True, "details": True}
    body = {"inputs": PROMPT, "parameters": parameters | {"best_of": 4}}
    answer = httpx2.post(f"{tiny_server.url}/generate", json=body).json()
    assert answer["generated_text"] == best.text
    others = answer["details"]["best_of_sequences"]
    texts = {completion.text for completion in drawn}
    assert {answer["generated_text"], *(other["generated_text"] for other in others)} == texts
    assert sorted([answer["details"]["seed"], *(other["seed"] for other in others)]) == [5, 6, 7, 8]
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        n=2,
        max_tokens=6,
        extra_body={"best_of": 4},
    )
    assert len(chat.choices) == 2
    assert chat.choices[0].logprobs is None
