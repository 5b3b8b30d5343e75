from __future__ import annotations

import json

import httpx2
import numpy as np
import pytest
import torch

from genserve.engine.thinking_budget import ThinkingBudget
from genserve.errors import InvalidRequest
from genserve.llm import LLM
from genserve.prompt import Chat, read_messages
from genserve.sampling.sampling_params import sampling_params
from genserve.textmodel.reasoning_tokens import BUDGET_MESSAGE
from tests.support.live_server import LiveServer
from tests.support.thinking_model import END, copy_with_tags


def forced(prompt, answer, *, begun, num_tokens, place=np.array):
    """Whether only the end tag was possible, before each token of an answer and after the last."""
    budget = ThinkingBudget(
        num_tokens=num_tokens, start_ids=[5], end_ids=[6], num_prompt_tokens=len(prompt), begun=begun
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
        (False, [1, 1, 1], 0, "...."),  # it does not think
        (False, [5, 1, 1, 1], 2, "...xx"),
        (False, [5], 0, ".x"),
        (False, [5, 1, 6, 1, 5, 1, 1], 2, ".......x"),  # each thought has the whole budget
        (True, [1, 1], 2, "..x"),
        (True, [1, 6, 1, 1], 2, "....."),
    ],
)
def test_the_end_tag_is_forced_when_the_budget_is_used_up(begun, answer, num_tokens, expected, place):
    assert forced([1, 5, 1], answer, begun=begun, num_tokens=num_tokens, place=place) == expected


def written(budget, num_tokens, *, at=None, says=1):
    """The tokens of an answer of which a budget writes some, and the model says the others."""
    token_ids, at = [], at or {}
    for index in range(num_tokens):
        if at.get(index) == "end":
            budget.end()
        logits = np.zeros(16, dtype=np.float32)
        budget(token_ids, logits)
        budget(token_ids, logits)  # again, as after a preemption
        left = np.flatnonzero(np.isfinite(logits)).tolist()
        said = at.get(index, says)
        own = says if said == "end" else said
        token_ids.append(left[0] if len(left) == 1 else own)
    return token_ids


def budget_of(num_tokens, *, begun=True, start=(5,), end=(6,), message=(7, 8), **options):
    return ThinkingBudget(
        num_tokens=num_tokens, start_ids=start, end_ids=end, message_ids=message, num_prompt_tokens=0,
        begun=begun, **options,
    )  # fmt: skip


def test_a_message_comes_before_the_end_of_a_thought():
    assert written(budget_of(2), 8) == [1, 1, 7, 8, 6, 1, 1, 1]
    assert written(budget_of(0), 3) == [6, 1, 1], "a thought without tokens has none"
    assert written(budget_of(2, begun=False), 9, at={1: 5}) == [1, 5, 1, 1, 7, 8, 6, 1, 1]
    assert written(budget_of(2, message=()), 5) == [1, 1, 6, 1, 1]
    assert written(budget_of(None), 5) == [1] * 5


def test_marks_may_have_several_tokens():
    marks = {"start": (5, 4), "end": (6, 3)}
    said = {0: 5, 1: 1, 2: 5, 3: 4, 4: 6}
    assert written(budget_of(3, begun=False, **marks), 12, at=said) == [5, 1, 5, 4, 6, 1, 1, 7, 8, 6, 3, 1]
    ended = written(budget_of(3, begun=False, **marks), 9, at={0: 5, 1: 4, 2: 6, 3: 3})
    assert ended == [5, 4, 6, 3, 1, 1, 1, 1, 1]


def test_a_thought_is_ended_on_request():
    assert written(budget_of(None), 7, at={3: "end"}) == [1, 1, 1, 7, 8, 6, 1]
    assert written(budget_of(9), 7, at={3: "end"}) == [1, 1, 1, 7, 8, 6, 1]
    assert written(budget_of(2), 7, at={3: "end"}) == [1, 1, 7, 8, 6, 1, 1], "it is ending"
    later = written(budget_of(None, begun=False), 7, at={1: "end", 3: 5})
    assert later == [1, 1, 1, 5, 6, 1, 1], "a later thought ends at once"


def test_a_message_waits_for_the_end_of_a_character():
    def decode(token_ids):
        return "a" * len(token_ids) if len(token_ids) != 2 else "a\ufffd"

    assert written(budget_of(2, decode=decode), 7) == [1, 1, 1, 7, 8, 6, 1]
    broken = budget_of(2, decode=lambda token_ids: "\ufffd")
    assert written(broken, 10) == [1, 1, 1, 1, 1, 7, 8, 6, 1, 1], "but not for ever"


def test_a_thought_that_is_ended_late_ends_behind_a_whole_character():
    """As when a client ends a thought whose tokens were not counted so far, or another engine goes on."""

    def left_after(budget, answer):
        logits = np.zeros(16, dtype=np.float32)
        budget(answer, logits)
        return np.flatnonzero(np.isfinite(logits)).tolist()

    def is_cut(token_ids):
        return "\ufffd" if token_ids[-1] == 2 else "a"

    for length in range(1, 12):
        budget = budget_of(None, decode=is_cut)
        budget.end()
        assert left_after(budget, [1] * length + [2]) == [*range(16)], "the character is not complete"
        assert left_after(budget, [1] * length + [2, 1]) == [7]
        whole = budget_of(None, decode=is_cut)
        whole.end()
        assert left_after(whole, [1] * length) == [7]


@pytest.mark.parametrize("cut", range(3, 8))
def test_a_message_on_request_goes_on_after_the_tokens_of_another_engine(cut):
    answer = written(budget_of(None), 8, at={3: "end"})
    resumed = budget_of(None)
    resumed.end()
    logits = np.zeros(16, dtype=np.float32)
    resumed(answer[:cut], logits)
    left = np.flatnonzero(np.isfinite(logits)).tolist()
    assert left == ([answer[cut]] if cut < 6 else [*range(16)])


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_message_goes_on_after_the_tokens_of_another_engine(cut):
    answer = written(budget_of(2), 8)
    resumed = budget_of(2)
    logits = np.zeros(16, dtype=np.float32)
    resumed(answer[:cut], logits)
    left = np.flatnonzero(np.isfinite(logits)).tolist()
    assert left == ([answer[cut]] if 2 <= cut < 5 else [*range(16)])


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
        limits = {"thinking_token_budget": 5, "reasoning_budget_message": ""}
        answer = llm.generate("why <think>", **options, **limits, suppress_tokens=[END])
        plain = llm.generate("why <think>", **options, suppress_tokens=[END])
    assert answer.token_ids[:5] == plain.token_ids[:5]
    assert answer.token_ids[5] == END != plain.token_ids[5]
    assert "</think>" in answer.text


def test_an_ended_thought_says_why(thinking_repository):
    options = {"ignore_eos": True, "temperature": 0.0, "max_tokens": 200, "thinking_token_budget": 5}
    with LLM(model_repository=thinking_repository) as llm:
        text = llm.generate("why <think>", **options).text
        assert f"{BUDGET_MESSAGE}</think>" in text
        own = llm.generate("why <think>", **options, reasoning_budget_message=" So:").text
        assert " So:</think>" in own
        for message in ("a<|im_end|>", "</think>", "<think>"):
            with pytest.raises(InvalidRequest) as raised:
                llm.generate("why", reasoning_budget_message=message)
            assert raised.value.field == "reasoning_budget_message"


@pytest.mark.parametrize("greedy", [pytest.param(True, marks=pytest.mark.extended), False])
def test_a_call_follows_an_ended_thought_with_and_without_drafts(tiny_repository, tmp_path, greedy):
    number = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": number}}]
    limits = {"thinking_token_budget": 4, "reasoning_budget_message": "so."}
    answers = []
    for speculation in ("none", "prompt_lookup"):
        root = copy_with_tags(tiny_repository, tmp_path / speculation)
        template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length }}<think>"
        (root / "tiny_tokenizer" / "1" / "chat_template.jinja").write_text(template)
        with (root / "tiny_logits" / "config.pbtxt").open("a") as config:
            value = f'value {{ string_value: "{speculation}" }}'
            config.write(f'parameters [ {{ key: "speculation" {value} }} ]\n')
        with LLM(model_repository=root) as llm:
            options = {"temperature": 0.0 if greedy else 1.0, "seed": 1, "max_tokens": 120}
            answer = llm.chat("so.</think> so.", tools=tools, tool_choice="required", **limits, **options)
        assert "so.</think>" in answer.text
        assert [(call.name, json.loads(call.arguments)["a"] in (1, 2)) for call in answer.tool_calls] == [
            ("add", True)
        ] * len(answer.tool_calls)
        assert answer.tool_calls
        answers.append((answer.text, answer.token_ids))
    assert answers[0] == answers[1]


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
    body |= {"seed": 1, "ignore_eos": True, "thinking_token_budget": 2, "reasoning_budget_message": ""}
    with LiveServer(thinking_repository) as server:
        reply = httpx2.post(f"{server.url}/v1/completions", json=body)
    assert reply.json()["choices"][0]["token_ids"][2] == END
