"""Chats with tools, rendered as by transformers, by templates in the manner of four model families."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from genserve.prompt import Chat, read_messages, read_tools
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_formats import SMOLLM2
from genserve.textmodel.tool_calling import ToolCalling, calls_as_text, tools_as_text

# Hermes, Qwen 2.5 and 3: tools as lines of JSON, calls in tags, several results in one turn of the user.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <args>}\\n</tool_call>" }}
    {{- "<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# Llama 3: tools with indentation in the first turn of the user, one call per turn, results as JSON.
LLAMA = """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>' + message['content'] | trim }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
        {%- for key, value in call.arguments | items %}{{- key }}={{- value }}{%- endfor %}
    {%- else %}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""
# Mistral: tools before the last turn of the user, parts of them by their keys, ids of nine characters.
MISTRAL = """\
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " }}
        {%- if loop.last and messages[0].role == "system" %}{{- messages[0].content + "\\n\\n" }}{%- endif %}
        {{- message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
# SmolLM3: tools by another name, as Python writes them.
SMOLLM3 = """\
{%- if xml_tools or python_tools %}
    {%- set ns = namespace(text="<tools>\\n") %}
    {%- for tool in xml_tools[:] %}{%- set ns.text = ns.text ~ (tool | string) ~ "\\n" %}{%- endfor %}
    {{- ns.text + "</tools>" }}
{%- endif %}
{%- for message in messages %}{{- "<|im_start|>" + message.role + message.content }}{%- endfor %}
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_city",
            "description": "Finds a city; é.",
            "parameters": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "of": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["name"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "find_city"}}
ARGUMENTS = {"name": 'Zürich "x"', "of": [1, 2]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"found": true}'}


def conversation(*, num_calls: int, as_text: bool) -> list[dict]:
    arguments = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
    call = {**CALL, "function": {**CALL["function"], "arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call] * num_calls},
        *[RESULT] * num_calls,
        {"role": "assistant", "content": "There."},
        {"role": "user", "content": "And now?"},
    ]


@pytest.fixture
def folder(tiny_repository: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_repository / "tiny_tokenizer" / "1", tmp_path / "tokenizer")


def tokenizer_with(folder: Path, **files: str) -> Tokenizer:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("template", "num_calls"),
    [(QWEN, 2), (LLAMA, 1), (MISTRAL, 2), (SMOLLM3, 1)],
    ids=["qwen", "llama", "mistral", "smollm3"],
)
@pytest.mark.parametrize(
    "tools", [TOOLS, pytest.param([], marks=pytest.mark.extended)], ids=["tools", "none"]
)
def test_the_prompt_is_that_of_transformers(folder, template, num_calls, tools):
    tokenizer = tokenizer_with(folder, **{"chat_template.jinja": template})
    name = "xml_tools" if "xml_tools" in template else "tools"
    variables = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, name: tools or None}
    [[expected], _] = render_jinja_template(
        conversations=[conversation(num_calls=num_calls, as_text=False)],
        chat_template=template,
        add_generation_prompt=True,
        **variables,
    )
    chat = Chat(
        messages=read_messages(conversation(num_calls=num_calls, as_text=True)), tools=read_tools(tools)
    )
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render(chat) == expected
    assert tokenizer.decode(tokenizer.encode_chat(chat), skip_special_tokens=False) == expected


@pytest.mark.parametrize("place", ["list", "file", "folder"])
def test_a_template_for_tools_is_used_when_there_are_tools(folder, place):
    by_name = {"default": "plain", "tool_use": "{{ tools | length }}"}
    named = [{"name": name, "template": template} for name, template in by_name.items()]
    if place == "list":
        config = json.loads((folder / "tokenizer_config.json").read_text())
        files = {"tokenizer_config.json": json.dumps(config | {"chat_template": named})}
    else:
        at = {"file": "chat_template.tool_use.jinja", "folder": "additional_chat_templates/tool_use.jinja"}
        files = {"chat_template.jinja": "plain", at[place]: "{{ tools | length }}"}
    tokenizer = tokenizer_with(folder, **files)
    asked = read_messages("Hi")
    assert tokenizer.decode(tokenizer.encode_chat(Chat(messages=asked))) == "plain"
    assert tokenizer.decode(tokenizer.encode_chat(Chat(messages=asked, tools=read_tools(TOOLS)))) == "2"


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL])
def test_names_of_special_tokens_in_tools_and_calls_stay_text(folder, template):
    tokenizer = tokenizer_with(folder, **{"chat_template.jinja": template})
    end = tokenizer.eos_token
    assert end

    def num_ends(text: str) -> int:
        written = json.dumps({text: [text]}).replace("<", "\\u003c")
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": written}}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": text},
        ]
        schema = {"type": "object", "properties": {text: {"enum": [text]}}, "description": text}
        function = {"name": "f", "description": text, "parameters": schema}
        tools = read_tools([{"type": "function", "function": function}])
        ids = tokenizer.encode_chat(Chat(messages=read_messages(messages), tools=tools))
        assert text in tokenizer.decode(ids, skip_special_tokens=False)
        return sum(ids.count(token_id) for token_id in tokenizer.eos_token_ids)

    assert num_ends(end) == num_ends("harmless")


def test_names_of_special_tokens_in_arguments_that_are_text_stay_text(folder):
    calls = "{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}"
    template = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    tokenizer = tokenizer_with(folder, **{"chat_template.jinja": template})
    assert not tokenizer.chat_template.roles.object_arguments
    # No object has the first of two values of a key.
    written = json.dumps({"a": tokenizer.eos_token})[:-1] + ', "a": 1}'
    call = {**CALL, "function": {"name": "now", "arguments": written}}
    chat = Chat(messages=read_messages([{"role": "assistant", "content": "", "tool_calls": [call]}]))
    ids = tokenizer.encode_chat(chat)
    assert tokenizer.decode(ids, skip_special_tokens=False) == written
    assert not tokenizer.eos_token_ids.intersection(ids)


def test_a_template_with_tools_but_no_calls_gets_the_calls_as_text(folder):
    tokenizer = tokenizer_with(folder, **{"chat_template.jinja": SMOLLM3})
    chat = Chat(messages=read_messages(conversation(num_calls=2, as_text=True)), tools=read_tools(TOOLS))
    rendered = ToolCalling(tokenizer, tool_format=None).rendered(chat)
    written = '{"name": "find_city", "arguments": ' + json.dumps(ARGUMENTS) + "}"
    text = f"<tool_call>\n{written}\n</tool_call>"
    assert rendered.messages[2].content == f"{text}\n{text}"
    assert not rendered.messages[2].tool_calls
    assert rendered.messages[3:] == chat.messages[3:]  # the template knows the results
    assert rendered.tools == chat.tools


def test_a_template_with_one_call_per_message_gets_calls_one_by_one(folder):
    tokenizer = tokenizer_with(folder, **{"chat_template.jinja": LLAMA})
    calls = [{**CALL, "id": f"id{i}", "function": {"name": f"f{i}", "arguments": "{}"}} for i in range(2)]
    results = [{**RESULT, "tool_call_id": f"id{i}", "content": f"{i}"} for i in (1, 0, 2)]
    said = {"role": "assistant", "content": "Two.", "tool_calls": calls}
    asked = {"role": "user", "content": "Go on."}
    chat = Chat(messages=read_messages([asked, said, *results, asked]), tools=read_tools(TOOLS))
    told = ToolCalling(tokenizer, tool_format=None).rendered(chat).messages
    assert [[call.name for call in message.tool_calls] for message in told] == [
        [], ["f0"], [], ["f1"], [], [], [],
    ]  # fmt: skip
    assert [message.content for message in told] == ["Go on.", "Two.", "0", "", "1", "2", "Go on."]


def test_the_text_before_a_call_is_a_part_of_the_thought_of_gpt_oss(folder):
    source = (Path(__file__).parent / "templates" / "gpt_oss.jinja").read_text()
    tokenizer = tokenizer_with(folder, **{"chat_template.jinja": source})
    call = {**CALL, "function": {"name": "now", "arguments": "{}"}}
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "so", "tool_calls": [call]}
    messages = read_messages([{"role": "user", "content": "?"}, said, RESULT])
    chat = ToolCalling(tokenizer, tool_format=None).rendered(Chat(messages=messages))
    prompt = tokenizer.decode(tokenizer.encode_chat(chat), skip_special_tokens=False)
    assert "<|channel|>analysis<|message|>so\n\nI look.<|end|>" in prompt


def test_a_template_without_tools_gets_them_as_text():
    chat = Chat(messages=read_messages(conversation(num_calls=2, as_text=True)), tools=read_tools(TOOLS))
    told = calls_as_text(tools_as_text(chat, SMOLLM2), SMOLLM2, with_results=True)
    system, tools, asked, called, first, second, *_ = told.messages
    assert not told.tools
    assert (system.role, system.content) == ("system", "Be brief.")
    assert tools.role == "system"
    assert tools.content.startswith("You are an expert in composing functions.")
    assert f"<tools>{json.dumps(TOOLS, ensure_ascii=False)}</tools>" in tools.content
    assert asked.content == "Where is it?"
    written = '{"name": "find_city", "arguments": ' + json.dumps(ARGUMENTS) + "}"
    assert called.content == f"<tool_call>[{written}, {written}]</tool_call>"
    assert called.tool_calls == ()
    assert (first.role, first.content) == ("user", '<tool_response>\n{"found": true}\n</tool_response>')
    assert second == first
    without_system = tools_as_text(Chat(messages=read_messages("Hi"), tools=read_tools(TOOLS)), SMOLLM2)
    assert [message.role for message in without_system.messages] == ["system", "user"]
