"""Chats in the form that templates take, in the manner of published ones, and rendered as by transformers."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from genserve.errors import InvalidRequest
from genserve.prompt import Chat, Message, read_messages
from genserve.text.chat_template import ChatTemplate
from genserve.text.message_roles import MessageRoles, arranged
from genserve.text.tool_formats import SMOLLM2
from genserve.textmodel.tool_calling import calls_as_text
from tests.support.model_families import PUBLISHED

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

_QWEN_RESULTS = """\
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
_CHATML_CALLS = """\
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
"""
_CHATML_END = """\
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
# Qwen 3.5 and later: the system message comes first, or the template raises.
QWEN35 = (
    """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
    {%- elif message.role == "user" %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
"""
    + _CHATML_CALLS
    + _QWEN_RESULTS
    + _CHATML_END
)
# Qwen 3: later system messages are turns.
QWEN3 = (
    """\
{%- for message in messages %}
    {%- if message.role == "system" or message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
"""
    + _CHATML_CALLS
    + _QWEN_RESULTS
    + _CHATML_END
)
# SmolLM 3 leaves out later system messages, without a word.
SMOLLM3 = """\
{{- "<|im_start|>system\\n## Custom Instructions\\n\\n" }}
{%- if messages[0].role == "system" %}{{- messages[0].content + "\\n\\n" }}{%- endif %}
{{- "<|im_end|>\\n" }}
{%- for message in messages %}
    {%- if message.role == "user" %}{{- "<|im_start|>user\\n" + message.content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" %}
        {{- "<|im_start|>assistant\\n" + message.content.lstrip("\\n") + "<|im_end|>\\n" }}
    {%- elif message.role == "tool" %}{{- "<|im_start|>user\\n" + message.content + "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""
# DeepSeek V3 moves all system messages to the beginning.
DEEPSEEK = """\
{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}
    {%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + message.content %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|Assistant|>' + message.content }}
        {%- for call in message.tool_calls or [] %}{{- '<|call|>' + call.function.name }}{%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}{{- '<|output|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}
"""
# DeepSeek R1, and V3 at first: either the content or calls.
DEEPSEEK_R1 = """\
{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}{%- set ns.system = message.content %}{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' and message.content is none %}
        {%- for call in message.tool_calls %}
            {{- '<|Assistant|><|call|>' + call.function.name + '\\n' + call.function.arguments + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{- '<|Assistant|>' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}{{- '<|output|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
"""
# Llama 3: later messages have their roles in the header.
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (message.content | tojson) + "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + message.tool_calls[0].function.name + '"}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
_MISTRAL_TURNS = """\
    {%- elif message.role == "user" %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == "assistant" %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}{{- '[TOOL_CALLS]' + call.function.name }}{%- endfor %}
        {{- eos_token }}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS]' + message.content | string + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
# Mistral Small 3.2: questions and answers alternate, also after the results of tools.
MISTRAL = (
    """\
{%- set system = "Mistral's own." %}{%- set turns = messages %}
{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in turns %}
    {%- if (message.tool_call_id or "123456789") | length != 9 %}{{- raise_exception("ID!") }}{%- endif %}
    {%- if not (message.role == "tool" or message.get("tool_calls")) %}
        {%- if (message.role == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate!") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token + '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- for message in turns %}
    {%- if message.role == "system" %}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
"""
    + _MISTRAL_TURNS
)
# Devstral Small 2507 takes system messages anywhere.
DEVSTRAL = (
    """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" %}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
"""
    + _MISTRAL_TURNS
)
# Gemma 2 has no system role, and Gemma 3 writes the system message into the first turn of the user.
_GEMMA_TURNS = """\
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- (prefix if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
GEMMA2 = (
    """\
{{- bos_token }}{%- set prefix = '' %}{%- set turns = messages %}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
"""
    + _GEMMA_TURNS
)
GEMMA3 = (
    """\
{{- bos_token }}{%- set prefix = '' %}{%- set turns = messages %}
{%- if messages[0].role == 'system' %}
    {%- set prefix = messages[0].content + '\\n\\n' %}{%- set turns = messages[1:] %}
{%- endif %}
"""
    + _GEMMA_TURNS
)
FIRST_ONLY = {"later_system": False}
ALTERNATES = {"later_system": False, "successive_users": False}
# The short templates by the names of published ones, which take their place in the folder PUBLISHED_TEMPLATES
# (see templates/README.md), and what they do not take.
TEMPLATES: dict[str, tuple[str, dict[str, bool]]] = {
    "Qwen3.5-4B": (QWEN35, FIRST_ONLY),
    "Qwen-Qwen3-0.6B": (QWEN3, {}),
    "HuggingFaceTB-SmolLM3-3B": (SMOLLM3, FIRST_ONLY),
    "deepseek-ai-DeepSeek-V3.1": (DEEPSEEK, FIRST_ONLY),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (
        DEEPSEEK_R1, FIRST_ONLY | {"any_content": False, "object_arguments": False}
    ),
    "meta-llama-Llama-3.2-3B-Instruct": (LLAMA3, {}),
    "Mistral-Small-3.2-24B-Instruct-2506": (
        MISTRAL, ALTERNATES | {"user_after_results": False, "any_call_ids": False}
    ),
    "unsloth-mistral-Devstral-Small-2507": (DEVSTRAL, {}),
    "google-gemma-2-2b-it": (GEMMA2, ALTERNATES | {"system": False}),
    "google-gemma-3-1b-it": (GEMMA3, ALTERNATES),
}
GEMMA_2, GEMMA_3 = "google-gemma-2-2b-it", "google-gemma-3-1b-it"
DEEPSEEK_R1_LLAMA = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"
MISTRAL_SMALL = "Mistral-Small-3.2-24B-Instruct-2506"
WITHOUT_TOOLS = (GEMMA_2, GEMMA_3)


def source(name: str) -> str:
    short, _ = TEMPLATES[name]
    return short if PUBLISHED is None else (Path(PUBLISHED) / f"{name}.jinja").read_text()


@lru_cache(maxsize=32)   # each has a process
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=SPECIAL_TOKENS, name="chat_template.jinja")


def reference(source: str, messages: list[dict[str, Any]]) -> str:
    [[rendered], _] = render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=True, **SPECIAL_TOKENS
    )
    return str(rendered)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_takes_is_learnt_when_it_is_loaded(name: str) -> None:
    _, differences = TEMPLATES[name]
    assert template(source(name)).roles == MessageRoles(**differences)


def test_a_template_that_renders_only_with_tools_is_asked_with_one() -> None:
    needs_tools = "{{ tools[0].function.name }}" + QWEN35
    assert template(needs_tools).roles == MessageRoles(later_system=False)


@pytest.mark.parametrize(
    "source", ["fixed", "{{ messages[0].tool_calls[0].id }}", "{{ 1 / 0 }}", "{{ 'a' * (2 ** 20) }}"]
)
def test_a_template_that_renders_no_question_gets_the_messages_as_they_are(source: str) -> None:
    assert template(source).roles == MessageRoles()


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "read", "arguments": {}}}


def turn(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


SYSTEM, ASKED = turn("system", "S"), turn("user", "U")
CALLED = turn("assistant", "", tool_calls=[CALL])
RESULT = turn("tool", "R", tool_call_id="abcdefghi", name="read")
ANSWERED = turn("assistant", "A")
LATER = turn("system", "L")
REMINDER = "<system-reminder>\nL\n</system-reminder>"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # After the user's turn, as Claude Code sends it, and after a result: a part of it.
        ([SYSTEM, ASKED, LATER], [SYSTEM, turn("user", f"U\n\n{REMINDER}")]),
        (
            [ASKED, CALLED, RESULT, LATER, ANSWERED, ASKED],
            [ASKED, CALLED, {**RESULT, "content": f"R\n\n{REMINDER}"}, ANSWERED, ASKED],
        ),
        # After an answer: a part of the next turn, or one of the user's.
        ([ASKED, ANSWERED, LATER, ASKED], [ASKED, ANSWERED, turn("user", f"{REMINDER}\n\nU")]),
        ([ASKED, ANSWERED, LATER], [ASKED, ANSWERED, turn("user", REMINDER)]),
        (
            [ASKED, ANSWERED, LATER, LATER, ANSWERED],
            [ASKED, ANSWERED, turn("user", f"{REMINDER}\n\n{REMINDER}"), ANSWERED],
        ),
        (
            [ASKED, CALLED, LATER, RESULT],
            [ASKED, CALLED, {**RESULT, "content": f"{REMINDER}\n\nR"}],
        ),
        # Nothing to say.
        ([ASKED, turn("system", ""), ANSWERED], [ASKED, ANSWERED]),
    ],
)
@pytest.mark.parametrize(
    "name", ["Qwen3.5-4B", "HuggingFaceTB-SmolLM3-3B", "deepseek-ai-DeepSeek-V3.1", MISTRAL_SMALL]
)
def test_a_later_system_message_joins_its_neighbour(
    name: str, given: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    rendered = template(source(name)).render(as_chat(given))
    assert rendered == reference(source(name), expected)
    assert rendered.count("system-reminder") == 2 * sum(message == LATER for message in given)


@pytest.mark.parametrize("name", [name for name, (_, takes) in TEMPLATES.items() if not takes])
def test_a_later_system_message_stays_where_the_template_takes_it(name: str) -> None:
    given = [SYSTEM, ASKED, LATER, CALLED, RESULT, LATER, ANSWERED, LATER, ASKED]
    assert template(source(name)).render(as_chat(given)) == reference(source(name), given)


@pytest.mark.parametrize("name", TEMPLATES)
def test_system_and_developer_messages_at_the_beginning_are_one(name: str) -> None:
    given = [SYSTEM, turn("developer", ""), turn("developer", "D"), ASKED]
    expected = [turn("user", "S\n\nD\n\nU")] if name == GEMMA_2 else [turn("system", "S\n\nD"), ASKED]
    assert template(source(name)).render(as_chat(given)) == reference(source(name), expected)


def test_a_template_without_a_system_role_gets_the_text_in_the_first_turn_of_the_user() -> None:
    gemma = template(source(GEMMA_2))
    assert gemma.render(as_chat([SYSTEM])) == reference(source(GEMMA_2), [turn("user", "S")])
    begun = gemma.render(as_chat([SYSTEM, ANSWERED, ASKED]))
    assert begun == reference(source(GEMMA_2), [turn("user", "S"), ANSWERED, ASKED])
    later = gemma.render(as_chat([SYSTEM, ASKED, LATER]))
    assert later == reference(source(GEMMA_2), [turn("user", f"S\n\nU\n\n{REMINDER}")])
    # As Gemma 3 writes it.
    chat = as_chat([SYSTEM, ASKED, ANSWERED, ASKED])
    assert gemma.render(chat) == template(source(GEMMA_3)).render(chat)


@pytest.mark.parametrize("said", ["", "I look."])
def test_a_template_that_writes_either_content_or_calls_gets_them_apart(said: str) -> None:
    call = {**CALL, "function": {"name": "read", "arguments": '{"path": "a"}'}}
    given = [ASKED, turn("assistant", said, tool_calls=[call]), RESULT, ANSWERED, ASKED]
    alone = [{"role": "assistant", "content": None, "tool_calls": [call]}, RESULT, ANSWERED, ASKED]
    expected = [ASKED, *([turn("assistant", said)] if said else []), *alone]
    rendered = template(source(DEEPSEEK_R1_LLAMA)).render(Chat(messages=read_messages(given)))
    assert rendered == reference(source(DEEPSEEK_R1_LLAMA), expected)
    assert '{"path": "a"}' in rendered


CALLS = """\
{%- for call in message.tool_calls or () %}{{- '<call>' ~ call.function.arguments }}{%- endfor %}
"""


@pytest.mark.parametrize(
    ("written", "is_apart"),
    [
        # A line for the content, unless it is null.
        ("{%- if message.content is not none %}{{- message.content ~ '\\n' }}{%- endif %}" + CALLS, False),
        # Gemma 4: the content behind the calls.
        (CALLS + "{{- message.content or '' }}", False),
        # llama.cpp's template for DeepSeek R1: calls only without a text.
        ("{%- if message.content %}{{- message.content }}{%- else %}" + CALLS + "{%- endif %}", True),
    ],
)
def test_text_and_calls_are_apart_only_if_the_template_drops_the_calls(written: str, is_apart: bool) -> None:
    whole = "{%- for message in messages %}{{- '<' ~ message.role ~ '>' }}" + written + "{%- endfor %}"
    call = {**CALL, "function": {"name": "read", "arguments": '{"path": "a"}'}}
    given = [ASKED, turn("assistant", "I look.", tool_calls=[call]), RESULT]
    rendered = template(whole).render(Chat(messages=read_messages(given)))
    assert (rendered.count("<assistant>"), rendered.count("<call>")) == (1 + is_apart, 1)


@pytest.mark.parametrize("name", [MISTRAL_SMALL, GEMMA_2, GEMMA_3])
def test_turns_of_the_user_are_one_where_they_must_alternate_with_answers(name: str) -> None:
    given = [ASKED, turn("user", ""), turn("user", "V"), ANSWERED, ASKED]
    expected = [turn("user", "U\n\nV"), ANSWERED, ASKED]
    assert template(source(name)).render(as_chat(given)) == reference(source(name), expected)
    with pytest.raises(InvalidRequest, match="alternate"):
        template(source(name)).render(as_chat([ANSWERED, ASKED]))


def test_a_turn_of_the_user_joins_the_result_before_it_where_an_answer_must_follow() -> None:
    given = [ASKED, CALLED, RESULT, turn("user", "V"), LATER, ANSWERED, ASKED]
    joined = {**RESULT, "content": f"R\n\nV\n\n{REMINDER}"}
    expected = [ASKED, CALLED, joined, ANSWERED, ASKED]
    mistral = source(MISTRAL_SMALL)
    assert template(mistral).render(as_chat(given)) == reference(mistral, expected)


def test_ids_of_calls_have_nine_letters_and_digits_where_the_template_wants_them() -> None:
    long = "call_0123456789abcdef01234567"
    call = {"id": long, "type": "function", "function": {"name": "read", "arguments": "{}"}}
    result = {**RESULT, "tool_call_id": long}
    called = read_messages([ASKED, turn("assistant", "", tool_calls=[call]), result])
    for name, is_short in ((MISTRAL_SMALL, True), ("Qwen3.5-4B", False)):
        _, answer, read = arranged(called, template(source(name)).roles)
        assert answer.tool_calls[0].id == read.tool_call_id
        assert (len(read.tool_call_id) == 9) is is_short
        assert (read.tool_call_id == long) is not is_short
    kept = Message(role="tool", content="R", tool_call_id="abcdefghi")
    assert arranged([kept], MessageRoles(any_call_ids=False)) == [kept]
    mistral = template(source(MISTRAL_SMALL))
    assert "[TOOL_RESULTS]" in mistral.render(Chat(messages=called))


ARGUMENTS, CUT = '{"a": {"b":"c"},"a":1}', '{"a": "b'


@pytest.mark.parametrize(
    ("written", "as_objects", "expected"),
    [
        ("'```' + call.function.arguments + '```'", False, (f"```{ARGUMENTS}```", f"```{CUT}```")),
        ("call.function.arguments", False, (ARGUMENTS, CUT)),
        ("call.function.arguments | tojson", True, ('{"a": 1}', json.dumps(CUT))),
        ("call.function.arguments.items() | list", True, ("[('a', 1)]", "[('a', 'b')]")),
    ],
)
def test_arguments_are_text_where_the_template_writes_them_as_they_are(
    written: str, as_objects: bool, expected: tuple[str, str]
) -> None:
    calls = f"{{%- for call in message.tool_calls or [] %}}{{{{ {written} }}}}{{%- endfor %}}"
    loaded = template(f"{{%- for message in messages %}}{{{{ message.content }}}}{calls}{{%- endfor %}}")
    assert loaded.roles == MessageRoles(object_arguments=as_objects)
    for arguments, text in zip((ARGUMENTS, CUT), expected, strict=True):
        call = {**CALL, "function": {"name": "read", "arguments": arguments}}
        called = turn("assistant", "", tool_calls=[call])
        assert loaded.render(Chat(messages=read_messages([ASKED, called, RESULT]))) == f"U{text}R"


# The system turn after the first question is in every request; others come while the agent works.
AGENT = [
    turn("system", "You are an agent."),
    turn("user", "Write hello.txt."),
    turn("system", "# Environment\nLinux"),
    turn("assistant", "I look first.", tool_calls=[CALL]),
    turn("tool", "No such file.", tool_call_id="abcdefghi", name="read"),
    turn("assistant", "", tool_calls=[CALL]),
    turn("tool", "Written.", tool_call_id="abcdefghi", name="read"),
    turn("system", "The user has opened hello.txt."),
    turn("assistant", "Done."),
    turn("user", "And now?"),
    turn("system", "Plan mode is on."),
    turn("assistant", "Nothing."),
    turn("system", "Plan mode is off."),
    turn("user", "Good."),
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_begins_with_the_prompt_of_the_turn_before(name: str) -> None:
    loaded = template(source(name))
    ends = [index for index, message in enumerate(AGENT) if message["role"] == "assistant"]
    chats = [as_chat(AGENT[:end]) for end in (*ends, len(AGENT))]
    if name in WITHOUT_TOOLS:
        chats = [calls_as_text(chat, SMOLLM2, with_results=True) for chat in chats]
    prompts = [loaded.render(chat) for chat in chats]
    assert len(prompts) == 5
    for before, after in pairwise(prompts):
        # R1 begins a thought, which it leaves out of the turns before.
        assert after.startswith(before.removesuffix("<think>\n"))
    for message in AGENT:
        assert message["role"] == "assistant" or message["content"] in prompts[-1]


def as_chat(messages: list[dict[str, Any]]) -> Chat:
    """Return a chat, whose calls have arguments as text."""
    called = {**CALL, "function": {"name": "read", "arguments": "{}"}}
    read = [turn | {"tool_calls": [called]} if "tool_calls" in turn else turn for turn in messages]
    return Chat(messages=read_messages(read))


def test_many_messages_are_joined_in_linear_time() -> None:
    roles = MessageRoles(successive_users=False)
    [joined] = arranged([Message(role="user", content="x" * 100)] * 10_000, roles)
    assert len(joined.content) == 10_000 * 102 - 2
