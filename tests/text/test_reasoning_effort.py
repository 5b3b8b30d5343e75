"""How requests control reasoning, in chat templates as models publish them, shortened to what they read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from genserve.prompt import Chat, Message, Reasoning
from genserve.text.chat_template import ChatTemplate

_TURNS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
)
_ANSWER = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
TEMPLATES = {
    "Qwen3": _TURNS + _ANSWER + (
        "{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}"
        "{%- endif %}{%- endif %}"
    ),
    "Qwen3.8": (
        "{%- set reasoning_instructions = '' %}"
        "{%- if enable_thinking is undefined or enable_thinking is true %}"
        "{%- set resolved_reasoning_effort = reasoning_effort|default('xhigh') %}"
        "{%- if resolved_reasoning_effort not in ('xhigh', 'medium', 'low') %}"
        "{{- raise_exception('Unexpected reasoning effort ' ~ reasoning_effort) }}{%- endif %}"
        "{%- if resolved_reasoning_effort == 'xhigh' %}{%- set reasoning_instructions = 'Think carefully.' %}"
        "{%- elif resolved_reasoning_effort == 'low' %}{%- set reasoning_instructions = 'Be brief.' %}"
        "{%- endif %}{%- endif %}{{- reasoning_instructions }}" + _TURNS + _ANSWER + "{%- endif %}"
    ),
    "SmolLM3": (
        "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}"
        "{%- if enable_thinking -%}{%- set reasoning_mode = '/think' -%}"
        "{%- else -%}{%- set reasoning_mode = '/no_think' -%}{%- endif -%}"
        "{{- 'Reasoning Mode: ' + reasoning_mode }}" + _TURNS + _ANSWER
        + "{%- if reasoning_mode == '/no_think' %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}{%- endif %}"
    ),
    "gpt-oss": (
        "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
        "{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '\\n\\n<|end|>' }}" + _TURNS
        + "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
    ),
    "Granite": (
        "{%- if thinking %}{{- 'Respond to every user query in a comprehensive way.' }}"
        "{%- else %}{{- 'You are a helpful AI assistant.' }}{%- endif %}" + _TURNS + _ANSWER + "{%- endif %}"
    ),
    "DeepSeek V3.1": (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}" + _TURNS
        + "{%- if add_generation_prompt -%}{{'<|Assistant|>'}}"
        "{%- if not thinking %}{{'</think>'}}{%- else %}{{'<think>'}}{%- endif %}{% endif %}"
    ),
    "GLM 4.5": (
        "[gMASK]<sop>{%- for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
        "{%- if m.role == 'user' and enable_thinking is defined and not enable_thinking %}/nothink"
        "{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt -%}<|assistant|>"
        "{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}"
        "{%- endif -%}"
    ),
    "Mistral Small 4": (
        "{%- set reasoning_effort = reasoning_effort if reasoning_effort is defined and reasoning_effort "
        "is not none else 'none' %}{%- if reasoning_effort not in ['none', 'high'] %}"
        "{{- raise_exception('reasoning_effort must be either \"none\" or \"high\"') }}{%- endif %}"
        "{{- '[MODEL_SETTINGS]' + reasoning_effort + '[/MODEL_SETTINGS]' }}" + _TURNS
    ),
    "Hunyuan 4": (
        "{%- if not reasoning_effort is defined %}{%- set reasoning_effort = 'high' %}"
        "{%- elif reasoning_effort not in ['high', 'no_think'] %}"
        "{{- raise_exception('should be no_think/high') }}{%- endif %}{{- reasoning_effort }}" + _TURNS
    ),
    "GLM 5": (
        "{%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort in "
        "['low', 'high'] else 'max' -%}Reasoning Effort: {{ effort | capitalize }}" + _TURNS
        + "{{- '<think>' if enable_thinking is not defined or enable_thinking else '</think>' }}"
    ),
    "Seed-OSS": (
        "{%- if thinking_budget is defined and thinking_budget == 0 %}{{- 'Answer directly.' }}"
        "{%- elif thinking_budget is defined and thinking_budget > 0 %}{{- 'Budget: ' ~ thinking_budget }}"
        "{%- endif %}" + _TURNS
    ),
    "none": _TURNS + _ANSWER + "{%- endif %}",
}
LOW, HIGH, NONE = (Reasoning(effort=effort) for effort in ("low", "high", "none"))
ON, OFF = Reasoning(enabled=True), Reasoning(enabled=False)


def effort(word: str) -> Reasoning:
    return Reasoning(effort=word)


def prompt(name: str, reasoning: Reasoning, **kwargs: Any) -> str:
    message = Message(role="user", content="hi")
    return template(name).render(Chat(messages=(message,), reasoning=reasoning, template_kwargs=kwargs))


@lru_cache(maxsize=16)   # each has a process
def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], special_tokens={}, name=name)


def reference(name: str, **kwargs: Any) -> str:
    conversation = [{"role": "user", "content": "hi"}]
    [rendered], _ = render_jinja_template(
        [conversation], chat_template=TEMPLATES[name], add_generation_prompt=True, **kwargs
    )
    return str(rendered)


@pytest.mark.parametrize(
    ("name", "reasoning", "kwargs"),
    [
        ("Qwen3", Reasoning(), {}),
        ("Qwen3", LOW, {"enable_thinking": True}),
        ("Qwen3", NONE, {"enable_thinking": False}),
        ("Qwen3", effort("minimal"), {"enable_thinking": False}),
        ("Qwen3", OFF, {"enable_thinking": False}),
        ("Qwen3", Reasoning(budget=0), {"enable_thinking": False}),
        ("Qwen3", Reasoning(enabled=False, effort="high"), {"enable_thinking": False}),
        ("SmolLM3", HIGH, {"enable_thinking": True}),
        ("SmolLM3", NONE, {"enable_thinking": False}),
        ("gpt-oss", Reasoning(), {}),
        ("gpt-oss", LOW, {"reasoning_effort": "low"}),
        ("gpt-oss", NONE, {"reasoning_effort": "low"}),
        ("gpt-oss", OFF, {"reasoning_effort": "low"}),
        ("gpt-oss", ON, {}),
        ("gpt-oss", effort("xhigh"), {"reasoning_effort": "high"}),
        ("gpt-oss", effort("extreme"), {}),
        ("Granite", HIGH, {"thinking": True}),
        ("Granite", NONE, {"thinking": False}),
        ("Granite", ON, {"thinking": True}),
        ("DeepSeek V3.1", effort("medium"), {"thinking": True}),
        ("DeepSeek V3.1", OFF, {"thinking": False}),
        ("GLM 4.5", NONE, {"enable_thinking": False}),
        ("GLM 4.5", ON, {"enable_thinking": True}),
        ("Mistral Small 4", NONE, {"reasoning_effort": "none"}),
        ("Mistral Small 4", LOW, {"reasoning_effort": "high"}),
        ("Mistral Small 4", effort("minimal"), {"reasoning_effort": "none"}),
        ("Mistral Small 4", effort("max"), {"reasoning_effort": "high"}),
        ("Mistral Small 4", effort("extreme"), {}),
        ("Mistral Small 4", OFF, {"reasoning_effort": "none"}),
        ("Qwen3.8", HIGH, {"enable_thinking": True, "reasoning_effort": "xhigh"}),
        ("Qwen3.8", LOW, {"enable_thinking": True, "reasoning_effort": "low"}),
        ("Qwen3.8", NONE, {"enable_thinking": False}),
        ("Hunyuan 4", NONE, {"reasoning_effort": "no_think"}),
        ("Hunyuan 4", effort("medium"), {"reasoning_effort": "high"}),
        ("GLM 5", effort("medium"), {"enable_thinking": True, "reasoning_effort": "medium"}),
        ("GLM 5", LOW, {"enable_thinking": True, "reasoning_effort": "low"}),
        ("GLM 5", NONE, {"enable_thinking": False}),
        ("Seed-OSS", Reasoning(budget=512), {"thinking_budget": 512}),
        ("Seed-OSS", NONE, {"thinking_budget": 0}),
        ("Seed-OSS", Reasoning(enabled=False, budget=512), {"thinking_budget": 0}),
        ("none", HIGH, {}),
        ("none", OFF, {}),
    ],
)
def test_a_template_gets_the_variables_that_it_reads(
    name: str, reasoning: Reasoning, kwargs: dict[str, Any]
) -> None:
    assert prompt(name, reasoning) == reference(name, **kwargs)


def test_variables_that_the_request_names_come_first() -> None:
    assert prompt("Qwen3", NONE, enable_thinking=True) == reference("Qwen3", enable_thinking=True)
    assert prompt("gpt-oss", LOW, reasoning_effort="high") == reference("gpt-oss", reasoning_effort="high")


@pytest.mark.parametrize(
    ("name", "reasoning", "reads"),
    [
        ("Qwen3", LOW, True),
        ("Qwen3", Reasoning(budget=9), False),
        ("Qwen3", Reasoning(), False),
        ("gpt-oss", ON, False),
        ("gpt-oss", effort("extreme"), False),
        ("Seed-OSS", Reasoning(budget=9), True),
        ("Seed-OSS", HIGH, False),
        ("none", NONE, False),
    ],
)
def test_it_is_known_what_a_template_does_not_read(name: str, reasoning: Reasoning, reads: bool) -> None:
    assert bool(template(name).reasoning.values(reasoning)) == reads
