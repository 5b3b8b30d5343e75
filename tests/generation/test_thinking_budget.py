from __future__ import annotations

import httpx2
import numpy as np
import pytest
import torch

from genserve.errors import InvalidRequest
from genserve.generation.sequence_plugins import ThinkingBudget
from genserve.llm import LLM
from genserve.prompt import Chat, read_messages
from genserve.sampling.sampling_params import sampling_params
from tests.support.live_server import LiveServer
from tests.support.thinking_model import END, copy_with_tags


def forced(prompt, answer, *, begun, num_tokens, place=np.array):
    """Whether only the end tag was possible, before each token of an answer and after the last."""
    budget = ThinkingBudget(
        num_tokens=num_tokens, start_id=5, end_id=6, num_prompt_tokens=len(prompt), begun=begun
    )
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
    ("begun", "answer", "num_tokens", "expected"),
    [
        (False, [1, 1, 1], 0, "...."),                  # it does not think
        (False, [5, 1, 1, 1], 2, "...xx"),
        (False, [5], 0, ".x"),
        (False, [5, 1, 6, 1, 5, 1, 1], 2, ".......x"),  # each thought has the whole budget
        (True, [1, 1], 2, "..x"),
        (True, [1, 6, 1, 1], 2, "....."),
    ],
)
def test_the_end_tag_is_forced_when_the_budget_is_used_up(begun, answer, num_tokens, expected, place):
    assert forced([1, 5, 1], answer, begun=begun, num_tokens=num_tokens, place=place) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"thinking_token_budget": -1},
        {"thinking_token_budget": 4, "structured_outputs": {"regex": "a"}},
        {"thinking_token_budget": 4, "use_beam_search": True, "beam_width": 2},
    ],
)
def test_an_invalid_budget_is_rejected(options):
    with pytest.raises(InvalidRequest) as raised:
        sampling_params(options)
    assert raised.value.field == "thinking_token_budget"


def test_a_model_that_does_not_think_rejects_a_budget(tiny_repository):
    with (
        LLM(model_repository=tiny_repository) as llm,
        pytest.raises(InvalidRequest, match="<think> and </think>") as raised,
    ):
        llm.generate("x", thinking_token_budget=4)
    assert raised.value.field == "thinking_token_budget"


@pytest.fixture
def thinking_repository(tmp_path, tiny_repository):
    return copy_with_tags(tiny_repository, tmp_path / "repository")


@pytest.mark.parametrize("greedy", [True, False])
def test_a_thought_keeps_its_budget_whatever_the_request_forbids(thinking_repository, greedy):
    options = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0 if greedy else 1.0, "seed": 1}
    with LLM(model_repository=thinking_repository) as llm:
        answer = llm.generate("why <think>", **options, thinking_token_budget=5, suppress_tokens=[END])
        plain = llm.generate("why <think>", **options, suppress_tokens=[END])
    assert answer.token_ids[:5] == plain.token_ids[:5]
    assert answer.token_ids[5] == END != plain.token_ids[5]
    assert "</think>" in answer.text


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("why", False),
        ("why <think>", True),
        ("why <think>hm, ", True),
        ("why <think>hm</think>", False),
        ("<think></think><think>", True),
        ("why <think><|im_end|>", False),
        ([{"role": "user", "content": "why <think>"}], False),
        ([{"role": "user", "content": "why"}, {"role": "assistant", "content": "<think>hm"}], True),
    ],
)
def test_a_prompt_that_leaves_a_thought_open_begins_a_thought(thinking_repository, prompt, begun):
    with LLM(model_repository=thinking_repository) as llm:
        if not isinstance(prompt, str):
            prompt = Chat(messages=read_messages(prompt), continue_final_message=len(prompt) == 2)
        ask = llm.generate if isinstance(prompt, str) else llm.chat
        answer = ask(prompt, max_tokens=1, thinking_token_budget=0)
    assert (answer.token_ids == (END,)) == begun


def test_the_parameter_has_vllms_name(thinking_repository):
    body = {"model": "tiny", "prompt": "why <think>", "max_tokens": 4, "return_token_ids": True}
    body |= {"seed": 1, "ignore_eos": True}
    with LiveServer(thinking_repository) as server:
        reply = httpx2.post(f"{server.url}/v1/completions", json=body | {"thinking_token_budget": 2})
    assert reply.json()["choices"][0]["token_ids"][2] == END
