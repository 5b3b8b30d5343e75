"""What Anthropic's clients send in turns and as tools, and what the model reads of it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from pydantic import TypeAdapter

from genserve.errors import InvalidRequest
from genserve.prompt import Chat
from genserve.server.dialects.anthropic.messages_body import MessagesBody
from genserve.structured_output.tool_grammar import ToolGrammar
from genserve.text.tool_formats import HERMES

ASKED = {"role": "user", "content": "a"}
TEXT = {"type": "text", "text": "t"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
LEFT_OUT = "[image left out: this model reads text only]"


def body(*messages: dict[str, Any], **fields: Any) -> MessagesBody:
    return MessagesBody.model_validate({"max_tokens": 9, "messages": [*messages] or [ASKED], **fields})


def called(*blocks: dict[str, Any], name: str = "f") -> tuple[dict[str, Any], ...]:
    """Return a turn that calls a tool, and its result."""
    call = {"type": "tool_use", "id": "t1", "name": name, "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [*blocks]}
    return {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}


def result_of(*blocks: dict[str, Any]) -> str:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    messages = body(ASKED, *called(*blocks), tools=tools).chat().messages
    assert messages[-1].role == "tool"
    return messages[-1].content


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (IMAGE, LEFT_OUT),
        ({"type": "tool_reference", "tool_name": "f"}, "The tool f can be called now."),
        ({"type": "tool_reference", "tool_name": "g"}, "The tool g cannot be called."),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}, "d"),
        (
            {
                "type": "document",
                "title": "T",
                "context": "C",
                "source": {"type": "content", "content": [TEXT, IMAGE]},
            },
            f"T\nC\nt\n{LEFT_OUT}",
        ),
        ({"type": "document", "source": {"type": "content", "content": "d"}}, "d"),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}},
            "[file left out: this model reads text only]",
        ),
        (
            {"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}},
            "[file left out: this model reads text only]",
        ),
        (
            {"type": "search_result", "source": "https://a", "title": "T", "content": [TEXT]},
            "T\nhttps://a\nt",
        ),
        (
            {"type": "browser_state", "tabs": []},
            "[browser_state left out: this model reads text only]",
        ),
    ],
)
def test_a_result_is_what_a_model_can_read_of_it(block: dict[str, Any], text: str) -> None:
    assert result_of(block) == text
    assert result_of(TEXT, block, TEXT) == f"t\n{text}\nt"


def test_reminders_behind_a_result_are_a_part_of_it() -> None:
    reminder = {"type": "text", "text": "<system-reminder>\nr\n</system-reminder>"}
    call, results = called(TEXT)
    [result] = results["content"]
    blocks = [TEXT, result, reminder, reminder, TEXT, reminder, result, TEXT]
    read = body(ASKED, call, {"role": "user", "content": blocks}).chat().messages[2:]
    text = reminder["text"]
    assert [(message.role, message.content) for message in read] == [
        ("user", "t"),
        ("tool", f"t\n\n{text}\n\n{text}"),
        ("user", f"t\n{text}"),
        ("tool", "t"),
        ("user", "t"),
    ]


def test_the_user_may_send_documents_and_search_results() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    found = {"type": "search_result", "source": "s", "title": "T", "content": [TEXT]}
    [message] = body({"role": "user", "content": [document, found, TEXT]}).chat().messages
    assert message.content == "d\nT\ns\nt\nt"


@pytest.mark.parametrize(
    "block", [IMAGE, {"type": "document", "source": {"type": "file", "file_id": "file_1"}}]
)
def test_an_image_of_the_user_is_rejected_with_its_place(block: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        body(ASKED, {"role": "user", "content": [TEXT, block]}).chat()
    assert raised.value.field == "messages[1].content[1]"
    assert raised.value.remedy


# A session that Anthropic's servers have begun, with their tools.
FOREIGN: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "mcp_tool_use", "id": "m1", "name": "n", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m1", "is_error": False, "content": "r"},
    {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
    {"type": "container_upload", "file_id": "f"},
    {"type": "code_execution_tool_result", "tool_use_id": "s2", "content": {"type": "error"}},
    {"type": "of_next_year", "text": 1},
]


def test_blocks_of_other_servers_are_left_out_by_name() -> None:
    thought = {"type": "thinking", "thinking": "h", "signature": "EqQBCgIYAhIM"}
    summary = {"type": "compaction", "content": "C"}
    answered = {"role": "assistant", "content": [thought, *FOREIGN, summary, TEXT]}
    request = body(ASKED, answered, ASKED, {"role": "assistant", "content": FOREIGN}, ASKED)
    asked, message, last = request.chat().messages
    assert (message.content, message.reasoning_content, message.tool_calls) == ("Ct", "h", ())
    assert (asked.content, last.content) == ("a", "a\na")
    assert request.unused() == [f"messages={block['type']}" for block in FOREIGN]


def test_documents_in_answers_are_left_out_by_name() -> None:
    documents: list[dict[str, Any]] = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
        {"type": "search_result", "source": "s", "title": "T", "content": [TEXT]},
    ]
    answer = {"role": "assistant", "content": [*documents, TEXT]}
    request = body({"role": "user", "content": documents}, answer, ASKED)
    asked, answered, _ = request.chat().messages
    assert (asked.content, answered.content) == ("d\nT\ns\nt", "t")
    assert request.unused() == ["messages=document", "messages=search_result"]


@pytest.mark.extended
def test_the_sdk_knows_the_blocks_that_are_tested() -> None:
    from anthropic.types import beta as sdk

    read = TypeAdapter(sdk.BetaContentBlockParam)
    for block in (IMAGE, TEXT, *FOREIGN[:6]):
        read.validate_python(block)


NOTE = {"name": "note", "description": "Writes a note.", "input_schema": {"type": "object"}}
SEARCH = {"name": "ToolSearch", "input_schema": {"type": "object"}}
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
EDITS = "view create str_replace insert"


@pytest.mark.parametrize(
    ("kind", "name", "commands", "inserts"),
    [
        ("bash_20241022", "bash", None, None),
        ("bash_20250124", "bash", None, None),
        ("text_editor_20241022", "str_replace_editor", f"{EDITS} undo_edit", "new_str"),
        ("text_editor_20250124", "str_replace_editor", f"{EDITS} undo_edit", "new_str"),
        ("text_editor_20250429", "str_replace_based_edit_tool", EDITS, "insert_text"),
        ("text_editor_20250728", "str_replace_based_edit_tool", EDITS, "insert_text"),
        ("memory_20250818", "memory", f"{EDITS} delete rename", "insert_text"),
    ],
)
def test_tools_of_anthropic_that_the_client_runs_are_functions(
    kind: str, name: str, commands: str | None, inserts: str | None
) -> None:
    request = body(tools=[{"type": kind, "name": name, "max_characters": 9}], tool_choice={"type": "any"})
    chat = request.chat()
    [tool] = chat.tools
    assert tool.name == name
    assert tool.description
    properties = tool.parameters["properties"]
    if commands is None:
        assert properties.keys() == {"command", "restart"}
    else:
        assert properties["command"]["enum"] == commands.split()
        assert inserts in properties
        assert ("insert_text" in properties) is (inserts == "insert_text")
    assert request.unused() == []
    ToolGrammar(tool_format=HERMES, tools={0: tool}, must_call=True, parallel=True, after_reasoning=False)


def test_the_memory_tool_takes_the_commands_of_the_sdk() -> None:
    """Each command of the SDK's types has its fields in the schema."""
    from anthropic.types import beta as sdk

    [tool] = body(tools=[{"type": "memory_20250818", "name": "memory"}]).chat().tools
    commands = (
        sdk.BetaMemoryTool20250818ViewCommand,
        sdk.BetaMemoryTool20250818CreateCommand,
        sdk.BetaMemoryTool20250818StrReplaceCommand,
        sdk.BetaMemoryTool20250818InsertCommand,
        sdk.BetaMemoryTool20250818DeleteCommand,
        sdk.BetaMemoryTool20250818RenameCommand,
    )
    fields = {name for command in commands for name in command.model_fields}
    assert fields == tool.parameters["properties"].keys()


HOSTED = [
    WEB,
    {"type": "web_fetch_20250910", "name": "web_fetch", "citations": {"enabled": True}},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "s", "configs": {"a b": {"enabled": False}}},
]


def test_tools_that_servers_run_are_left_out_by_name() -> None:
    request = body(tools=[*HOSTED[:2], NOTE, *HOSTED[2:]])
    chat = request.chat()
    assert [tool.name for tool in chat.tools] == ["note"]
    places = (0, 1, 3, 4, 5, 6)
    expected = [f"tools[{i}]={tool['type']}" for i, tool in zip(places, HOSTED, strict=True)]
    assert request.unused() == expected
    assert request.names()["tools[0]"] == "tools[2]"


@pytest.mark.parametrize("choice", [None, {"type": "any"}, {"type": "auto"}])
def test_a_request_whose_only_tool_is_left_out_is_rejected(choice: dict[str, Any] | None) -> None:
    with pytest.raises(InvalidRequest) as raised:
        body(tools=[WEB], tool_choice=choice).chat()
    assert raised.value.field == "tools[0].type"
    assert "MCP" in raised.value.remedy


def test_a_tool_that_is_left_out_cannot_be_chosen() -> None:
    with pytest.raises(InvalidRequest) as raised:
        body(tools=[NOTE, WEB], tool_choice={"type": "tool", "name": "web_search"}).chat()
    assert raised.value.field == "tool_choice.name"
    assert "MCP" in raised.value.remedy
    assert not body(tools=[WEB], tool_choice={"type": "none"}).chat().tools


def test_fields_without_effect_take_anything() -> None:
    request = body(
        thinking={"type": "adaptive", "display": "in_verse"},
        mcp_servers=[{"type": "url", "url": "https://a", "name": "s"}],
        container={"id": "c"},
        service_tier="of_next_year",
        context_management={"edits": []},
    )
    assert request.chat().messages
    assert sorted(request.unused()) == [
        "container",
        "context_management",
        "mcp_servers=url",
        "service_tier",
        "thinking.display",
    ]


# Claude Code's: the tools of MCP servers are deferred, and come into `tools` when they were found.
DEFERRED = [{**NOTE, "name": f"mcp__s__{name}", "defer_loading": True} for name in ("x", "y", "z")]


def found(*names: str) -> tuple[dict[str, Any], ...]:
    references = ({"type": "tool_reference", "tool_name": f"mcp__s__{name}"} for name in names)
    return called(*references, name="ToolSearch")


def visible(chat: Chat) -> list[str]:
    return [tool.name for tool in chat.template_tools]


def test_a_deferred_tool_is_not_in_the_prompt_until_a_result_refers_to_it() -> None:
    tools = [DEFERRED[0], SEARCH, *DEFERRED[1:]]
    chat = body(ASKED, tools=tools).chat()
    assert visible(chat) == ["ToolSearch"]
    assert chat.callable_tools == chat.tools
    chat = body(ASKED, *found("z", "x"), tools=tools).chat()
    assert visible(chat) == ["ToolSearch"]
    assert [tool.name for tool in chat.callable_tools] == ["ToolSearch", "mcp__s__x", "mcp__s__z"]
    described = chat.messages[-1].content.split("The tool ")
    for text, name in zip(described[1:], ("mcp__s__z", "mcp__s__x"), strict=True):
        assert text.startswith(f"{name} can be called now:\n")
        assert json.loads(text.partition("\n")[2])["function"]["name"] == name


def test_a_prompt_stays_the_beginning_of_the_next_when_tools_are_found() -> None:
    turns = [ASKED, *found("y"), *called(TEXT, name="mcp__s__y"), *found("x", "y"), ASKED]
    chats = [body(*turns[:end], tools=[SEARCH, *DEFERRED]).chat() for end in (1, 3, 5, 7)]
    for before, after in pairwise(chats):
        assert before.template_tools == after.template_tools
        assert after.messages[: len(before.messages)] == before.messages
    assert '"mcp__s__y"' not in chats[3].messages[-2].content
    # The tools come into the request when they were found.
    later = body(*turns[:3], tools=[SEARCH, DEFERRED[1]]).chat()
    assert later.messages == chats[1].messages


def test_a_deferred_tool_that_was_called_or_chosen_is_in_the_prompt() -> None:
    """The conversation has lost its reference, as after a compaction."""
    calls = (*called(TEXT, name="mcp__s__z"), *called(TEXT, name="mcp__s__x"))
    chat = body(ASKED, *calls, tools=[*DEFERRED, SEARCH]).chat()
    assert visible(chat) == ["ToolSearch", "mcp__s__z", "mcp__s__x"]
    choice = {"type": "tool", "name": "mcp__s__y"}
    assert visible(body(tools=[*DEFERRED, SEARCH], tool_choice=choice).chat()) == ["ToolSearch", "mcp__s__y"]


@pytest.mark.parametrize("others", [[], [NOTE, HOSTED[4]]])
def test_deferred_tools_are_in_the_prompt_if_nothing_here_can_find_them(others: list[dict[str, Any]]) -> None:
    names = [tool.name for tool in body(tools=[*DEFERRED, *others]).chat().template_tools]
    assert names[:3] == ["mcp__s__x", "mcp__s__y", "mcp__s__z"]
