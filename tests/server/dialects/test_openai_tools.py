"""Tools in Responses and chats: namespaces, custom and deferred tools, OpenAI's own; foreign histories."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response

from genserve.prompt import Chat, Message, Tool, ToolCall
from genserve.server.dialects.openai.chat_tools import CallChunks
from genserve.server.dialects.openai.response_output import OutputItems
from genserve.server.dialects.openai.response_store import ResponseStore
from genserve.server.dialects.openai.responses_body import ResponseRequest, ResponsesBody
from genserve.text.tool_call_parser import ToolCallParser
from genserve.text.tool_formats import HERMES
from tests.support.live_server import LiveServer
from tests.support.response_events import EVENTS, assert_typed, events_of
from tests.support.scripted_model import scripted_repository

TEXT, PATCHES, WRITES, LOCAL, SHELL, EDITS, SEARCHES, CALLED, SHORT = "123456789"
PATCH = '*** Begin Patch\n+"\u00e9" \\ \U0001f600\n'


def called(*calls: tuple[str, dict[str, Any]]) -> str:
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "<tool_call>\n" + "\n</tool_call>\n<tool_call>\n".join(written) + "\n</tool_call>"


UPDATE = {"type": "update_file", "path": "a", "diff": "@@\n-b"}
SCRIPTS = {
    TEXT: "Hello \u00e9.",
    PATCHES: called(("apply_patch", {"input": PATCH}), ("mcp__notes__write", {})),
    WRITES: called(("mcp__notes__write", {})),
    LOCAL: called(("local_shell", {"command": ["ls"], "timeout_ms": 9})),
    SHELL: called(("shell", {"commands": ["ls"]})),
    EDITS: called(("apply_patch", UPDATE)),
    SEARCHES: called(("tool_search", {"query": "notes"})),
    CALLED: "It is there.",
    SHORT: called(("n__w", {})),
}
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n<tool_call>' }}
{%- for tool in tools %}{{ tool.function.name + ' ' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments | items %}{{ name }}={{ value }};{% endfor %}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MESSAGE = {"role": "user", "content": TEXT}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
GRAMMAR = {
    "type": "grammar",
    "syntax": "lark",
    "definition": 'start: "*** Begin Patch" LF /(.+)/ LF\n%import common.LF',
}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": GRAMMAR}
WRITE = {"type": "function", "name": "write", "description": "Write.", "parameters": None, "strict": True}
NOTES = {"type": "namespace", "name": "mcp__notes", "description": "Notes.", "tools": [WRITE]}
DEFERRED = NOTES | {"tools": [WRITE | {"defer_loading": True}]}
MIXED = [CUSTOM, {"type": "web_search", "external_web_access": True}, NOTES, {"type": "computer"}]
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find tools.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    },
}
# Types of tools that servers of OpenAI run.
HOSTED = (
    {"type": "web_search", "filters": {"allowed_domains": ["a"]}, "search_context_size": "low"},
    {"type": "web_search_preview"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "computer_use_preview", "environment": "linux", "display_width": 1, "display_height": 1},
    {"type": "mcp", "server_label": "m", "server_url": "http://m", "defer_loading": True},
    {"type": "programmatic_tool_calling"},
    {"type": "tool_search"},
    {"type": "shell", "environment": {"type": "container_auto"}},
    {"type": "telepathy", "name": 3, "tools": "all", "parameters": []},
)
# Items that other servers have made.
FOREIGN = (
    {"type": "web_search_call", "id": "ws_1", "status": "failed", "action": {"type": "search", "query": "q"}},
    {"type": "mcp_call", "id": "m", "name": "n", "arguments": "{}", "server_label": "s", "output": "o"},
    {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": [{"name": "n", "input_schema": {}}]},
    {"type": "mcp_approval_request", "id": "m", "name": "n", "arguments": "{}", "server_label": "s"},
    {"type": "compaction", "encrypted_content": "e"},
    {"type": "agent_message", "author": "a", "content": [{"type": "encrypted_content", "text": 3}]},
    {"type": "image_generation_call", "id": "i", "status": "generating", "result": "aGk="},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
    {"type": "program", "id": "p", "call_id": "c", "code": "1", "fingerprint": "f"},
    {"type": "telepathy", "id": 3, "status": {}, "content": 4, "tools": 5, "summary": 6, "action": 7},
)


@pytest.fixture(scope="module")
def server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("scripted") / "repository"
    with LiveServer(scripted_repository(tiny_repository, root, SCRIPTS, template=TEMPLATE)) as server:
        yield server


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def create(http: httpx2.Client, **body: Any) -> httpx2.Response:
    answer = http.post("/v1/responses", json={"input": TEXT, **body})
    assert answer.status_code == 200, answer.text
    return answer


def stream(http: httpx2.Client, **body: Any) -> list[dict[str, Any]]:
    events = events_of(http.post("/v1/responses", json={"input": TEXT, "stream": True, **body}).text)
    for event in events:
        assert_typed(EVENTS[event["type"]], event)
    return events


def chat_of(**body: Any) -> Chat:
    fields = ResponsesBody.model_validate({"input": TEXT, **body})
    [chat] = ResponseRequest(body=fields, store=ResponseStore(max_bytes=0), max_bytes=0).prompts()
    assert isinstance(chat, Chat)
    return chat


def names(chat: Chat) -> list[str]:
    return [tool.name for tool in chat.tools]


def num_tokens(server: LiveServer, *messages: Message, tools: Sequence[str] = ()) -> int:
    chat = Chat(messages=messages, tools=tuple(Tool(name=name) for name in tools))
    return len(server.model.tokenizer.encode_chat(chat))


def test_custom_tools_and_those_of_a_namespace_are_called(http, client, server):
    ask = {"input": PATCHES, "tools": MIXED, "cache_salt": "mixed"}
    events = stream(http, **ask)
    of_input = [event for event in events if "custom_tool_call_input" in event["type"]]
    *deltas, done = of_input
    assert "".join(event["delta"] for event in deltas) == done["input"] == PATCH
    assert len(deltas) > 10, "the input is streamed as it is written"
    custom, function = events[-1]["response"]["output"]
    expected = {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH, "status": "completed"}
    assert custom.items() >= expected.items()
    assert "namespace" not in custom
    named = {"type": "function_call", "name": "write", "namespace": "mcp__notes", "arguments": "{}"}
    assert function.items() >= named.items()
    items = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert (items[1]["name"], items[1]["namespace"]) == ("write", "mcp__notes")
    assert events[-1]["response"]["tools"] == [CUSTOM, NOTES]

    answer = create(http, **ask)
    assert_typed(Response, answer.json())
    assert answer.headers["x-genserve-ignored"] == "tools[1]=web_search,tools[3]=computer"
    # The next turn: the calls with their results, by their ids and by `previous_response_id`.
    results = [
        {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "Done"},
        {"type": "function_call_output", "call_id": function["call_id"], "output": {"ok": CALLED}},
    ]
    history = [{"role": "user", "content": PATCHES}, custom, function, *results]
    by_items = client.responses.create(model="tiny", input=history, tools=MIXED)
    first = events[-1]["response"]["id"]
    by_id = client.responses.create(model="tiny", input=results, tools=MIXED, previous_response_id=first)
    assert by_items.output_text == by_id.output_text == SCRIPTS[CALLED]
    calls = (
        ToolCall(id="c", name="apply_patch", arguments=json.dumps({"input": PATCH})),
        ToolCall(id="d", name="mcp__notes__write", arguments="{}"),
    )
    messages = (
        Message(role="user", content=PATCHES),
        Message(role="assistant", tool_calls=calls),
        Message(role="tool", content="Done", tool_call_id="c"),
        Message(role="tool", content=f'{{"ok": "{CALLED}"}}', tool_call_id="d"),
    )
    expected = num_tokens(server, *messages, tools=("apply_patch", "mcp__notes__write"))
    assert by_items.usage.input_tokens == by_id.usage.input_tokens == expected


def test_a_custom_call_that_is_cut_has_its_input_so_far(http):
    cut = create(http, input=PATCHES, tools=MIXED, stop=["Patch"]).json()
    [call] = cut["output"]
    assert (call["type"], call["status"], call["input"]) == ("custom_tool_call", "incomplete", "*** Begin ")
    going_on = create(http, input=[MESSAGE], previous_response_id=cut["id"]).json()
    assert going_on["status"] == "completed"


OUTCOME = {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}


@pytest.mark.parametrize(
    ("key", "tool", "call", "arguments", "result", "shown"),
    [
        (
            LOCAL,
            {"type": "local_shell"},
            {"action": {"type": "exec", "env": {}, "command": ["ls"], "timeout_ms": 9}},
            {"command": ["ls"], "timeout_ms": 9},
            {"output": "a"},
            "a",
        ),
        (
            SHELL,
            {"type": "shell", "environment": {"type": "local"}},
            {"action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None}},
            {"commands": ["ls"]},
            {"output": [OUTCOME]},
            json.dumps([OUTCOME]),
        ),
        pytest.param(
            EDITS,
            {"type": "apply_patch"},
            {"operation": UPDATE},
            UPDATE,
            {"status": "failed"},
            "failed",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            EDITS,
            {"type": "apply_patch"},
            {"operation": UPDATE},
            UPDATE,
            {"output": "ok"},
            "ok",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_openai_tools_that_the_client_runs_are_called_by_items_of_their_own(
    http, client, server, key, tool, call, arguments, result, shown
):
    kind = tool["type"]
    whole = create(http, input=key, tools=[tool]).json()
    assert_typed(Response, whole)
    [called] = whole["output"]
    assert called.items() >= {"type": f"{kind}_call", "status": "completed", **call}.items()
    assert whole["tools"] == [tool]
    events = stream(http, input=key, tools=[tool])
    [item] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert item.items() >= {"type": f"{kind}_call", **call}.items()

    id_field = "id" if kind == "local_shell" else "call_id"  # as in OpenAI's types
    output = {"type": f"{kind}_call_output", id_field: called["call_id"], **result}
    more = [output, {"role": "user", "content": CALLED}]
    history = [{"role": "user", "content": key}, called, *more]
    again = client.responses.create(model="tiny", input=history, tools=[tool])
    by_id = client.responses.create(model="tiny", input=more, tools=[tool], previous_response_id=whole["id"])
    messages = (
        Message(role="user", content=key),
        Message(role="assistant", tool_calls=(ToolCall(id="a", name=kind, arguments=json.dumps(arguments)),)),
        Message(role="tool", content=shown, tool_call_id="a"),
        Message(role="user", content=CALLED),
    )
    expected = num_tokens(server, *messages, tools=(kind,))
    assert again.usage.input_tokens == by_id.usage.input_tokens == expected
    assert again.output_text == SCRIPTS[CALLED]
    listed = http.get(f"/v1/responses/{by_id.id}/input_items", params={"order": "asc"}).json()
    assert [one["type"] for one in listed["data"]][1:3] == [f"{kind}_call", f"{kind}_call_output"]


def test_half_a_call_of_such_a_tool_is_left_out(http):
    for key, tool in ((LOCAL, "local_shell"), (EDITS, "apply_patch"), (SHELL, "shell")):
        cut = create(http, input=key, tools=[{"type": tool}], stop=["ls", "update"]).json()
        assert cut["output"] == []
        create(http, previous_response_id=cut["id"])


def test_a_search_makes_deferred_tools_known(http, client, server):
    tools = [SEARCH, FUNCTION, DEFERRED]
    assert names(chat_of(tools=tools)) == ["tool_search", "f"]
    whole = create(http, input=SEARCHES, tools=tools).json()
    assert_typed(Response, whole)
    [search] = whole["output"]
    expected = {"type": "tool_search_call", "execution": "client", "arguments": {"query": "notes"}}
    assert search.items() >= expected.items()
    events = stream(http, input=SEARCHES, tools=tools)
    assert events[-1]["response"]["output"][0]["arguments"] == {"query": "notes"}

    found = {
        "type": "tool_search_output",
        "call_id": search["call_id"],
        "execution": "client",
        "status": "completed",
        "tools": [DEFERRED, {"type": "mcp", "server_label": "m"}],
    }
    history = [{"role": "user", "content": SEARCHES}, search, found]
    chat = chat_of(input=[*history, MESSAGE, search, found], tools=tools)
    assert names(chat) == ["tool_search", "f", "mcp__notes__write"]
    # What comes before the search stays cached.
    assert [tool.name for tool in chat.template_tools] == ["tool_search", "f"]
    first, second = (message.content for message in chat.messages if message.role == "tool")
    now, described = first.split(":\n")
    assert second == f"{now}."
    assert json.loads(described) == Tool(name="mcp__notes__write", description="Write.").as_dict()
    # Clients may send the found tools only there, and the history may come by an id.
    assert names(chat_of(input=history, tools=[SEARCH])) == ["tool_search", "mcp__notes__write"]
    short = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "w"}]}
    results = [found | {"tools": [short]}, {"role": "user", "content": SHORT}]
    later = client.responses.create(model="tiny", input=results, tools=[SEARCH])
    assert (later.output[0].namespace, later.output[0].name) == ("n", "w")


def test_deferred_tools_are_known_if_they_were_called_or_chosen_or_nothing_finds_them():
    tools = [SEARCH, FUNCTION, DEFERRED]
    call = CALL | {"name": "write", "namespace": "mcp__notes"}
    history = [MESSAGE, call, OUTPUT, MESSAGE]
    everything = ["tool_search", "f", "mcp__notes__write"]
    assert names(chat_of(input=history, tools=tools)) == everything
    assert sorted(names(chat_of(tools=tools, tool_choice={"type": "function", "name": "write"}))) == sorted(
        everything
    )
    assert names(chat_of(tools=[{"type": "tool_search"}, FUNCTION, DEFERRED])) == everything[1:]


def test_additional_tools_are_added_once(http):
    added = {"type": "additional_tools", "role": "developer", "tools": [CUSTOM, NOTES, *HOSTED]}
    assert names(chat_of(input=[added, MESSAGE, added])) == ["apply_patch", "mcp__notes__write"]
    assert names(chat_of(input=[added, MESSAGE], tools=[FUNCTION, NOTES])) == [
        "f",
        "mcp__notes__write",
        "apply_patch",
    ]
    first = create(http, input=[added, {"role": "user", "content": WRITES}])
    assert first.json()["output"][0]["namespace"] == "mcp__notes"
    assert "input[0].tools[2]=web_search" in first.headers["x-genserve-ignored"]
    later = create(http, input=WRITES, previous_response_id=first.json()["id"])
    assert later.json()["output"][0]["namespace"] == "mcp__notes"
    assert "x-genserve-ignored" not in later.headers


@pytest.mark.parametrize("tool", HOSTED, ids=lambda tool: tool["type"])
def test_tools_that_servers_run_are_left_out_and_named(http, tool):
    answer = create(http, tools=[tool, FUNCTION])
    assert answer.headers["x-genserve-ignored"] == f"tools[0]={tool['type']}"
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function"]
    create(http, tools=[tool], tool_choice="none")
    for choice in ("auto", "required"):
        alone = http.post("/v1/responses", json={"input": TEXT, "tools": [tool], "tool_choice": choice})
        assert (alone.status_code, alone.json()["error"]["param"]) == (400, "tools[0].type")
    named = {"input": TEXT, "tools": [tool, FUNCTION], "tool_choice": {"type": tool["type"]}}
    assert http.post("/v1/responses", json=named).json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("item", FOREIGN, ids=lambda item: item["type"])
def test_items_of_other_servers_are_left_out_and_named(http, server, item):
    answer = create(http, input=[MESSAGE, item, MESSAGE])
    assert answer.headers["x-genserve-ignored"] == f"input={item['type']}"
    message = Message(role="user", content=TEXT)
    assert answer.json()["usage"]["input_tokens"] == num_tokens(server, message, message)
    create(http, input=[MESSAGE], previous_response_id=answer.json()["id"])


def test_a_search_that_another_server_has_run_adds_its_tools():
    call = {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {"paths": ["n"]}}
    found = {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [DEFERRED]}
    chat = chat_of(input=[MESSAGE, call, found, MESSAGE], tools=[SEARCH])
    assert names(chat) == ["tool_search", "mcp__notes__write"]
    assert [message.role for message in chat.messages] == ["user", "user"]


def test_results_may_lack_their_calls_and_have_any_form(http):
    picture = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    parts = [{"type": "input_text", "text": "A"}, picture, {"type": "input_file", "file_id": "f"}]
    left_out = [f"[{word} left out: this model reads text only]" for word in ("image", "file")]
    for output, text in (
        ("x", "x"),
        (parts[:1] * 2, "AA"),
        (parts, "\n".join(["A", *left_out])),
        ({"a": "\u00e9"}, '{"a": "\u00e9"}'),
        ([1, {"b": 2}], '[1, {"b": 2}]'),
    ):
        chat = chat_of(input=[OUTPUT | {"output": output}])
        assert chat.messages == (Message(role="tool", content=text, tool_call_id="c"),)
    without_id = {"type": "function_call_output", "name": "write", "namespace": "n", "output": "x"}
    assert chat_of(input=[without_id]).messages[0].name == "n__write"
    create(http, input=[OUTPUT, OUTPUT | {"type": "custom_tool_call_output", "output": parts}, MESSAGE])


def test_an_answer_with_a_picture_in_a_history_has_a_placeholder():
    content = [{"type": "output_text", "text": "See: "}, {"type": "output_image", "image_url": "u"}]
    chat = chat_of(input=[{"role": "assistant", "content": content}, MESSAGE])
    assert chat.messages[0].content == "See: [image left out: this model reads text only]"


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_a_picture_in_a_message_is_an_error_with_its_place(http, role):
    content = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": "u"}]
    answer = http.post("/v1/responses", json={"input": [{"role": role, "content": content}, MESSAGE]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("input[0].content[1]", "invalid_request")


@pytest.mark.parametrize("arguments", ['{"path": "a", "text": "b', "{", "", "no JSON", "[1]"])
@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_arguments_that_were_cut_are_passed_on(http, server, arguments, status):
    call = CALL | {"arguments": arguments, "status": status}
    answer = create(http, input=[MESSAGE, call, OUTPUT, MESSAGE]).json()
    seen = arguments if arguments.startswith('{"path') else "{}"
    messages = (
        Message(role="user", content=TEXT),
        Message(role="assistant", tool_calls=(ToolCall(id="c", name="f", arguments=seen),)),
        Message(role="tool", content="x", tool_call_id="c"),
        Message(role="user", content=TEXT),
    )
    assert answer["usage"]["input_tokens"] == num_tokens(server, *messages)


# What agents send in every request, with words that no list of today has.
UNUSED = {
    "include": ["reasoning.encrypted_content", "everything"],
    "context_management": [{"type": "compaction", "compact_threshold": 3}],
    "client_metadata": {"x": 1},
    "prompt_cache_key": "k",
    "service_tier": "ultrafast",
    "safety_identifier": "s",
    "user": "u",
    "reasoning": {"effort": "ultra", "summary": "terse", "context": "all_turns"},
    "text": {"verbosity": "loud"},
}


def test_fields_without_effect_take_any_value_and_are_named(http):
    answer = create(http, **UNUSED, metadata={"a": 3}, store=False)
    named = answer.headers["x-genserve-ignored"].split(",")
    expected = ["include[0]", "include[1]", "reasoning.summary"]
    expected += ["text.verbosity", *(UNUSED.keys() - {"include", "reasoning", "text"})]
    assert {*named} >= {*expected}
    assert answer.json()["metadata"] == {"a": 3}
    options = {"include_usage": True, "include_obfuscation": False, "include_everything": 3}
    body = {"input": TEXT, "stream": True, "stream_options": options}
    streamed = http.post("/v1/responses", json=body)
    assert streamed.status_code == 200
    ignored = streamed.headers["x-genserve-ignored"]
    assert ignored == "stream_options.include_obfuscation,stream_options.include_everything"


def test_a_choice_names_a_tool_as_the_client_does():
    tools = [*MIXED, {"type": "shell"}, NOTES | {"name": "other"}]
    write = {"type": "function", "name": "write"}
    for choice, name in (
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "mcp__notes__write"}, "mcp__notes__write"),
        (write, "mcp__notes__write"),
        (write | {"namespace": "other"}, "other__write"),
        ({"type": "shell"}, "shell"),
    ):
        chat = chat_of(tools=tools, tool_choice=choice)
        assert (chat.tool_choice, chat.allowed_tools) == ("required", (name,))
        several = {"type": "allowed_tools", "mode": "auto", "tools": [choice, {"type": "web_search"}]}
        allowed = chat_of(tools=tools, tool_choice=several).allowed_tools
        both = ("mcp__notes__write", "other__write")
        assert allowed == (both if choice == write else (name,))
    other = {"type": "namespace", "name": "other"}
    namespace = {"type": "allowed_tools", "mode": "required", "tools": [other]}
    assert chat_of(tools=tools, tool_choice=namespace).allowed_tools == ("other__write",)
    assert chat_of(tools=tools, tool_choice="any").tool_choice == "required"
    none_left = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    assert chat_of(tools=tools, tool_choice=none_left).tool_choice == "none"
    custom = chat_of(tools=tools).tools[0]
    assert custom.parameters["required"] == ["input"]
    assert GRAMMAR["definition"] in custom.parameters["properties"]["input"]["description"]


CHAT_CUSTOM = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /(.|\\n)*/"}},
    },
}
CHAT_WRITE = {"type": "function", "function": {"name": "mcp__notes__write"}}


def test_custom_tools_of_chats_are_called(http, client, server):
    user = {"role": "user", "content": PATCHES}
    tools = [CHAT_CUSTOM, CHAT_WRITE]
    answer = client.chat.completions.create(model="tiny", messages=[user], tools=tools)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    custom, function = choice.message.tool_calls
    assert (custom.type, custom.custom.name, custom.custom.input) == ("custom", "apply_patch", PATCH)
    assert (function.type, function.function.name) == ("function", "mcp__notes__write")

    entries: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for chunk in client.chat.completions.create(model="tiny", messages=[user], tools=tools, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            entries[call.index].append(call.model_dump(exclude_unset=True))
    first, *others = entries[0]
    assert (first["type"], first["custom"]["name"]) == ("custom", "apply_patch")
    assert "".join(entry["custom"]["input"] for entry in [first, *others]) == PATCH
    assert all("function" not in entry and "id" not in entry for entry in others)
    assert entries[1][0]["function"]["name"] == "mcp__notes__write"

    results = [
        {"role": "tool", "tool_call_id": custom.id, "content": "Done"},
        {"role": "tool", "tool_call_id": function.id, "content": CALLED},
    ]
    history = [user, choice.message.model_dump(exclude_unset=True), *results]
    again = client.chat.completions.create(model="tiny", messages=history, tools=tools)
    assert again.choices[0].message.content == SCRIPTS[CALLED]
    calls = (
        ToolCall(id="c", name="apply_patch", arguments=json.dumps({"input": PATCH})),
        ToolCall(id="d", name="mcp__notes__write", arguments="{}"),
    )
    messages = (
        Message(role="user", content=PATCHES),
        Message(role="assistant", tool_calls=calls),
        Message(role="tool", content="Done", tool_call_id="c"),
        Message(role="tool", content=CALLED, tool_call_id="d"),
    )
    expected = num_tokens(server, *messages, tools=("apply_patch", "mcp__notes__write"))
    assert again.usage.prompt_tokens == expected


def test_a_cut_chat_goes_on(http, server):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"path": "a'}}
    messages = [MESSAGE, {"role": "assistant", "content": None, "tool_calls": [call]}, MESSAGE]
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    seen = ToolCall(id="c", name="f", arguments='{"path": "a"}')
    user = Message(role="user", content=TEXT)
    expected = num_tokens(server, user, Message(role="assistant", tool_calls=(seen,)), user)
    assert answer.json()["usage"]["prompt_tokens"] == expected


def test_tools_of_chats_that_servers_run_are_left_out_and_named(http):
    tools = [{"type": "web_search", "function": 3}, CHAT_WRITE, {"type": "mcp"}]
    body = {"messages": [MESSAGE], "web_search_options": {}}
    answer = http.post("/v1/chat/completions", json=body | {"tools": tools})
    assert answer.status_code == 200
    expected = "web_search_options,tools[0]=web_search,tools[2]=mcp"
    assert answer.headers["x-genserve-ignored"] == expected
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": []}}}
    rejected = http.post("/v1/chat/completions", json=body | {"tools": [*tools, bad]})
    assert rejected.json()["error"]["param"] == "tools[3].function.parameters"


RANDOM = 'a\u00e9\U0001f600"\\\n\t\x01{}</tool_call> u12'


def random_calls(draw: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Return calls of custom tools, of those in a namespace, of one of OpenAI's own and of a function."""
    text = "".join(draw.choices(RANDOM, k=draw.randrange(12)))
    known = (
        ("apply_patch", {"input": text}),
        ("mcp__notes__write", {"a": text}),
        ("mcp__notes__paste", {"input": text}),
        ("shell", {"commands": [text]}),
        ("f", {}),
    )
    return draw.choices(known, k=draw.randint(1, 4))


def pieces(draw: random.Random, text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = at + draw.randint(1, 7)
        yield text[at:end]
        at = end


def escaped(draw: random.Random, arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=draw.random() < 0.5)


def test_calls_are_what_was_written_however_the_stream_is_cut():
    paste = {"type": "custom", "name": "paste"}
    tools = [CUSTOM, NOTES | {"tools": [WRITE, paste]}, {"type": "shell"}, FUNCTION]
    body = ResponsesBody.model_validate({"input": TEXT, "tools": tools})
    request = ResponseRequest(body=body, store=ResponseStore(max_bytes=0), max_bytes=0)
    [chat] = request.prompts()
    draw = random.Random(11)
    for _ in range(200):
        calls = random_calls(draw)
        written = HERMES.written([(name, escaped(draw, arguments)) for name, arguments in calls])
        parser = ToolCallParser(HERMES, tools={tool.name: tool for tool in chat.tools})
        output, chunks = OutputItems(request.offer.tools), CallChunks({"apply_patch", "mcp__notes__paste"})
        events, entries = b"", []
        for piece in [*pieces(draw, written), ""]:
            delta = parser.push(piece, last=not piece)
            events += output.add(delta)
            entries += [entry for call in delta.tool_calls for entry in chunks.add(call)]
        events += output.close("completed")
        entries += chunks.close()
        assert len(output.items) == len(calls)
        deltas: dict[str, str] = {}
        for event in events_of(events.decode()):
            assert_typed(EVENTS[event["type"]], event)
            if event["type"].endswith(".delta"):
                deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
        streamed = [""] * len(calls)
        for entry in map(json.loads, entries):
            streamed[entry["index"]] += entry.get("custom", {}).get("input", "")
            streamed[entry["index"]] += entry.get("function", {}).get("arguments", "")
        for item, text, (name, arguments) in zip(output.items, streamed, calls, strict=True):
            called = "__".join(part for part in (item.get("namespace"), item.get("name", "shell")) if part)
            assert called == name
            if item["type"] == "custom_tool_call":
                assert item["input"] == text == arguments["input"] == deltas.get(item["id"], "")
            elif item["type"] == "shell_call":
                assert item["action"]["commands"] == arguments["commands"]
                assert json.loads(text) == arguments
            else:
                assert json.loads(item["arguments"]) == json.loads(text) == arguments
                assert deltas[item["id"]] == item["arguments"]


@pytest.fixture(scope="module")
def drawing(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A model that draws its answers, with a template that is short enough for tools."""
    root = tmp_path_factory.mktemp("drawing") / "repository"
    shutil.copytree(tiny_repository, root)
    (root / "tiny_tokenizer" / "1" / "chat_template.jinja").write_text(TEMPLATE)
    with LiveServer(root) as server:
        yield server


@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [
        pytest.param("regex", r'[ab"\n]{2,6}!', r'[ab"\n]{2,6}!', marks=pytest.mark.extended),
        ("lark", 'start: ("+" /[xy\\\\]{0,3}/ LF)~1..3\n%import common.LF', r"(\+[xy\\]{0,3}\n){1,3}"),
    ],
)
def test_the_input_of_a_custom_tool_follows_its_grammar(drawing, syntax, definition, pattern):
    form = {"syntax": syntax, "definition": definition}
    custom = {"type": "custom", "name": "paste", "format": {"type": "grammar", **form}}
    in_chat = {"type": "custom", "custom": {"name": "paste", "format": {"type": "grammar", "grammar": form}}}
    with openai.OpenAI(base_url=f"{drawing.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(3):
            body = {"seed": seed, "temperature": 1.5, "parallel_tool_calls": False}
            common = {"model": "tiny", "tool_choice": "required", "extra_body": body}
            response = client.responses.create(input="hi", tools=[custom], **common)
            [call] = response.output
            assert re.fullmatch(pattern, call.input), call.input
            message = {"role": "user", "content": "hi"}
            chat = client.chat.completions.create(messages=[message], tools=[in_chat], **common)
            assert chat.choices[0].message.tool_calls[0].custom.input == call.input


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"type": "poem"}, "format.type"),
        ({"type": "grammar", "syntax": "ebnf", "definition": "a"}, "format.syntax"),
        ({"type": "grammar", "syntax": "lark"}, "format.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": "start: other"}, "format.definition"),
        ({"type": "grammar", "syntax": "regex", "definition": "(?=a)b"}, "format.definition"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_named(http, form, field):
    named = {"name": "c", "format": form}
    tools = [{"type": "web_search"}, NOTES | {"tools": [WRITE, {"type": "custom", **named}]}]
    answer = http.post("/v1/responses", json={"input": TEXT, "tools": tools})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"tools[1].tools[1].{field}")
    grammar = {name: value for name, value in form.items() if name != "type"}
    nested = {"type": form["type"], "grammar": grammar}
    custom = {"type": "custom", "custom": {"name": "c", "format": nested}}
    body = {"messages": [MESSAGE], "tools": [{"type": "web_search"}, custom]}
    answer = http.post("/v1/chat/completions", json=body)
    place = "tools[1].custom." + (field if field.endswith("type") else field.replace(".", ".grammar."))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, place)


SHELL_COMMAND = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
DEVELOPER = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}
SAID = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TEXT}]}
AGENTS = DEFERRED | {"name": "multi_agent_v1", "tools": [WRITE | {"name": "spawn_agent"}]}
# Parts of requests as agents send them, with what other servers have left in the history.
CODEX = {
    "input": [DEVELOPER, SAID],
    "tools": [SHELL_COMMAND, AGENTS, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"x-codex-turn": "1"},
    "reasoning": {"effort": "ultra", "summary": "auto", "context": "auto"},
    "text": {"verbosity": "low"},
    "service_tier": "priority",
    "stream_options": {"reasoning_summary_delivery": "sequential_cutoff"},
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"}
COPILOT = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": TEXT}],
    "tools": [CHAT_WRITE, CHAT_CUSTOM],
    "tool_choice": "auto",
    "reasoning_effort": "high",
    "verbosity": "low",
    "store": False,
    "prompt_cache_key": "k",
    "top_p": 1,
    "temperature": 0,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", CODEX),
        ("/v1/responses", CODEX | {"tools": [SHELL_COMMAND, CUSTOM, SEARCH, NOTES]}),
        ("/v1/responses", CODEX | {"input": [{"type": "additional_tools", "tools": [CUSTOM]}, SAID]}),
        ("/v1/responses", CODEX | {"input": [SAID, THOUGHT, CALL, OUTPUT, DEVELOPER, SAID], "tools": []}),
        ("/v1/responses", CODEX | {"input": [SAID, *FOREIGN, SAID], "tools": [SHELL_COMMAND, *HOSTED]}),
        ("/v1/responses", CODEX | {"input": [SAID, {"type": "custom_tool_call", "call_id": "c", "name": "p",
                                                    "input": ""}, OUTPUT, SAID], "tool_choice": "none"}),
        ("/v1/chat/completions", COPILOT),
        ("/v1/chat/completions", COPILOT | {"tool_choice": "any", "web_search_options": {},
                                            "messages": [{"role": "user", "content": WRITES}]}),
        ("/v1/chat/completions", COPILOT | {"tools": [CHAT_WRITE, *HOSTED], "max_completion_tokens": 20}),
    ],
)  # fmt: skip
def test_what_agents_send_is_accepted(http, path, body):
    for streams in (True, False):
        more = {} if streams else {"stream": False, "stream_options": None}
        answer = http.post(path, json=body | more)
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.text or '"error": null' in answer.text
