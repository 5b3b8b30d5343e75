"""Turns in the manner of Claude Code, sent by Anthropic's SDK to a model whose template is strict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.live_server import LiveServer
from tests.support.scripted_model import scripted_repository

if TYPE_CHECKING:
    import anthropic  # in the functions that need it: it takes three seconds

# The system message comes first, as in Qwen 3.5; tools are shown by their names.
TEMPLATE = (
    "{% if tools %}<tool_call>{% for t in tools %}{{ t.function.name }},{% endfor %}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "[{{ m.role[0] }}: {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}]"
    "{% endfor %}{% if add_generation_prompt %}[a: {% endif %}"
)
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
SCRIPTS = {
    "#1": "ok: 12",
    "#6": CALL % ("bash", '{"command": "ls"}'),
    "#7": CALL % ("find", "{}"),
    "#8": CALL % ("note", "{}"),
}
SYSTEM: Any = "S"
ENVIRONMENT: Any = {"role": "system", "content": "E"}
WEB: Any = {"type": "web_search_20250305", "name": "web_search"}
BASH: Any = {"type": "bash_20250124", "name": "bash"}
FIND: Any = {"name": "find", "input_schema": {"type": "object"}}
NOTE: Any = {"name": "note", "input_schema": {"type": "object"}, "defer_loading": True}


@pytest.fixture(scope="module")
def server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("claude") / "repository"
    with LiveServer(scripted_repository(tiny_repository, root, SCRIPTS, template=TEMPLATE)) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def prompts(server: LiveServer) -> Iterator[list[str]]:
    """The prompt of each request."""
    inputs, read = server.model.inputs, []
    encode = inputs.encode

    def noted(chat: Any, **limits: Any) -> Any:
        token_ids = encode(chat, **limits)
        read.append(server.model.tokenizer.decode(token_ids))
        return token_ids

    inputs.encode = noted
    yield read
    del inputs.encode


def ask(client: anthropic.Anthropic, messages: list[Any], *, stream: bool = False, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 90, "system": SYSTEM, "messages": messages}
    if stream:
        with client.messages.stream(**given, **fields) as events:
            return events.get_final_message()
    return client.messages.create(**given, **fields)


def result(call: Any, *blocks: Any) -> Any:
    return {"type": "tool_result", "tool_use_id": call.id, "content": [*blocks]}


@pytest.mark.parametrize("stream", [True, False])
def test_a_task_with_a_tool_of_anthropics_and_a_picture(
    client: anthropic.Anthropic, prompts: list[str], stream: bool
) -> None:
    turns: list[Any] = [{"role": "user", "content": "#6"}, ENVIRONMENT]
    called = ask(client, turns, stream=stream, tools=[WEB, BASH])
    assert called.stop_reason == "tool_use"
    [call] = called.content
    assert (call.name, call.input) == ("bash", {"command": "ls"})
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    turns += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result(call, {"type": "text", "text": "#1"}, image)]},
    ]
    answered = ask(client, turns, stream=stream, tools=[WEB, BASH])
    assert answered.content[0].text == "ok: 12"
    asked = "bash,[s: S][u: #6\n\n<system-reminder>\nE\n</system-reminder>][a: "
    assert prompts[0].endswith(asked)
    assert prompts[1].endswith(
        asked + "bash][t: #1\n[image left out: this model reads text only]][a: "
    )


def test_a_tool_is_found_and_called(client: anthropic.Anthropic, prompts: list[str]) -> None:
    turns: list[Any] = [{"role": "user", "content": "#7"}]
    called = ask(client, turns, tools=[FIND, NOTE])
    [call] = called.content
    assert call.name == "find"
    reference = {"type": "tool_reference", "tool_name": "note"}
    turns += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result(call, reference, {"type": "text", "text": "#8"})]},
    ]
    found = ask(client, turns, tools=[FIND, NOTE])
    [call] = found.content
    assert call.name == "note"
    assert prompts[1].startswith(prompts[0])
    assert found.usage.cache_read_input_tokens >= 16
    assert '"name": "note"' in prompts[1]
    assert client.messages.count_tokens(
        model="tiny", system=SYSTEM, messages=turns, tools=[FIND, NOTE]
    ).input_tokens == found.usage.input_tokens + found.usage.cache_read_input_tokens


def test_what_is_left_out_has_a_header(client: anthropic.Anthropic, caplog: pytest.LogCaptureFixture) -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    turns: list[Any] = [
        {"role": "user", "content": "#1"}, {"role": "assistant", "content": [search]}, ENVIRONMENT
    ]
    with caplog.at_level("INFO"):
        response = client.messages.with_raw_response.create(
            model="tiny", max_tokens=9, messages=turns, tools=[WEB, BASH],
            extra_body={"mcp_servers": [{"name": "s"}]},
        )
    left_out = "mcp_servers=url,tools[0]=web_search_20250305,messages=server_tool_use"
    assert response.headers["x-genserve-ignored"] == left_out
    assert f'left_out="{left_out}"' in caplog.text


def test_errors_are_those_of_the_sdk(client: anthropic.Anthropic) -> None:
    import anthropic

    image = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\].*'image'"):
        ask(client, [{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305") as raised:
        ask(client, [{"role": "user", "content": "#1"}], tools=[WEB])
    assert "MCP" in raised.value.body["error"]["remedy"]  # type: ignore[index,call-overload]
    bad = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "text"}}}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[1\]\.input_schema"):
        ask(client, [{"role": "user", "content": "#1"}], tools=[WEB, bad])
