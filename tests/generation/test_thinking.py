from __future__ import annotations

import json
import shutil

import httpx2
import numpy as np
import pytest
import torch

from genserve.errors import InvalidRequest
from genserve.generation.thinking import ThinkingBudget
from genserve.llm import LLM
from genserve.sampling.params import sampling_params
from tests.live import LiveServer

START, END = 318, 319


def forced(prompt, answer, *, num_tokens, place=np.array):
    """Whether nothing but the end tag could be picked, before each token of an answer and after the last."""
    budget = ThinkingBudget(num_tokens=num_tokens, start_id=5, end_id=6, num_prompt_tokens=len(prompt))
    seen = []
    for length in range(len(answer) + 1):
        logits = place(np.ones(8, dtype=np.float32))
        budget([*prompt, *answer[:length]], logits)
        left = np.flatnonzero(np.isfinite(np.asarray(logits))).tolist()
        assert left in ([6], [*range(8)])
        seen.append(left == [6])
    return "".join("x" if one else "." for one in seen)


@pytest.mark.parametrize("place", [np.array, torch.tensor])
@pytest.mark.parametrize(
    ("prompt", "answer", "num_tokens", "expected"),
    [
        ([1], [1, 1, 1], 0, "...."),                    # it does not think
        ([1], [5, 1, 1, 1], 2, "...xx"),
        ([1], [5], 0, ".x"),
        ([1], [5, 1, 6, 1, 5, 1, 1], 2, ".......x"),    # each thought has the whole budget
        ([1, 5, 1, 1], [1, 1], 2, "..x"),               # begun by the prompt, which does not count
        ([5, 1, 6], [1, 1], 0, "..."),                  # ended by the prompt
    ],
)
def test_the_end_tag_is_picked_when_the_budget_is_used_up(prompt, answer, num_tokens, expected, place):
    assert forced(prompt, answer, num_tokens=num_tokens, place=place) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"thinking_token_budget": -1},
        {"thinking_token_budget": 4, "structured_outputs": {"regex": "a"}},
        {"thinking_token_budget": 4, "use_beam_search": True, "beam_width": 2},
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(options):
    with pytest.raises(InvalidRequest) as raised:
        sampling_params(options)
    assert raised.value.field == "thinking_token_budget"


def test_a_model_that_does_not_think_refuses_a_budget(tiny_repository):
    with LLM(tiny_repository) as llm, pytest.raises(InvalidRequest, match="<think> and </think>") as raised:
        llm.generate("x", thinking_token_budget=4)
    assert raised.value.field == "thinking_token_budget"


@pytest.fixture
def thinking_repository(tmp_path, tiny_repository):
    """The last two tokens of the tiny model's vocabulary are the tags."""
    root = shutil.copytree(tiny_repository, tmp_path / "repository")
    path = root / "tiny_tokenizer" / "1" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-2]
    vocab = {token: i for token, i in tokenizer["model"]["vocab"].items() if i < START}
    tokenizer["model"]["vocab"] = vocab
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": i, "content": tag, "special": False}
        for i, tag in ((START, "<think>"), (END, "</think>"))
    ]
    path.write_text(json.dumps(tokenizer))
    return root


@pytest.mark.parametrize("greedy", [True, False])
def test_an_answer_thinks_no_longer_than_its_budget_whatever_is_forbidden(thinking_repository, greedy):
    options = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0 if greedy else 1.0, "seed": 1}
    with LLM(thinking_repository) as llm:
        answer = llm.generate("why <think>", **options, thinking_token_budget=5, suppress_tokens=[END])
        plain = llm.generate("why <think>", **options, suppress_tokens=[END])
    assert answer.token_ids[:5] == plain.token_ids[:5]
    assert answer.token_ids[5] == END != plain.token_ids[5]
    assert "</think>" in answer.text


def test_it_is_vllms_name_on_the_wire(thinking_repository):
    body = {"model": "tiny", "prompt": "why <think>", "max_tokens": 4, "return_token_ids": True}
    with LiveServer(thinking_repository) as server:
        reply = httpx2.post(f"{server.url}/v1/completions", json=body | {"thinking_token_budget": 2})
    assert reply.json()["choices"][0]["token_ids"][2] == END
