"""Anthropic's dialect over a model that writes given answers."""

from __future__ import annotations

import json
import re
import uuid

import httpx2
import pytest

from tests.support.answer_timings import without_timings
from tests.support.live_server import LiveServer
from tests.support.scripted_model import SCRIPTS, scripted_repository

# Shows what it is given; `enable_thinking` is a variable, as in Qwen's.
TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}"
    "{% if m.name %} {{ m.name }}{% endif %}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant: {% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}"
    "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}"
)
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"name": "add", "input_schema": NUMBER}, {"name": "sub", "input_schema": {"type": "object"}}]
HEAD = '"id": "msg_1", "type": "message", "role": "assistant", "model": "tiny"'


@pytest.fixture(scope="module")
def scripted(tiny_repository, tmp_path_factory):
    root = tmp_path_factory.mktemp("messages") / "repository"
    with LiveServer(scripted_repository(tiny_repository, root, SCRIPTS, template=TEMPLATE)) as server:
        yield server


@pytest.fixture
def http(scripted):
    with httpx2.Client(base_url=scripted.url, timeout=60) as client:
        yield client


def ask(http, content="#1", **fields):
    """Ask for an answer; each request has a prefix cache of its own, since the usage counts cached tokens."""
    messages = [{"role": "user", "content": content}]
    salt = {"cache_salt": uuid.uuid4().hex}
    body = {"model": "tiny", "max_tokens": 64, "messages": messages, **salt, **fields}
    return http.post("/v1/messages", json=body)


def answer(http, content="#1", **fields):
    response = ask(http, content, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def stream(http, content="#1", **fields):
    """A streamed answer with the same id in each run."""
    response = ask(http, content, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return without_timings(re.sub(r"msg_[0-9a-f]{32}", "msg_1", response.text))


def start(num_tokens, *, num_cached_tokens=0):
    usage = (
        f'{{"input_tokens": {num_tokens}, "cache_creation_input_tokens": 0, '
        f'"cache_read_input_tokens": {num_cached_tokens}, "output_tokens": 0}}'
    )
    return (
        'event: message_start\ndata: {"type": "message_start", "message": {'
        f'{HEAD}, "content": [], "stop_reason": null, "stop_sequence": null, "usage": {usage}}}}}\n\n'
    )


def block(index, content, *deltas):
    """The events of a content block."""
    begin = f'{{"type": "content_block_start", "index": {index}, "content_block": {content}}}'
    end = f'{{"type": "content_block_stop", "index": {index}}}'
    written = f"event: content_block_start\ndata: {begin}\n\n"
    for delta in deltas:
        data = f'{{"type": "content_block_delta", "index": {index}, "delta": {delta}}}'
        written += f"event: content_block_delta\ndata: {data}\n\n"
    return f"{written}event: content_block_stop\ndata: {end}\n\n"


def text_block(index, *texts):
    deltas = (f'{{"type": "text_delta", "text": {json.dumps(text)}}}' for text in texts)
    return block(index, '{"type": "text", "text": ""}', *deltas)


def end(reason, num_prompt_tokens, num_tokens, *, sequence="null", counted=""):
    usage = (
        f'{{"input_tokens": {num_prompt_tokens}, "cache_creation_input_tokens": 0, '
        f'"cache_read_input_tokens": 0, "output_tokens": {num_tokens}{counted}}}'
    )
    ending = f'{{"stop_reason": "{reason}", "stop_sequence": {sequence}}}'
    return (
        f'event: message_delta\ndata: {{"type": "message_delta", "delta": {ending}, "usage": {usage}}}\n\n'
        'event: message_stop\ndata: {"type": "message_stop"}\n\n'
    )


def test_a_whole_answer(http):
    written = answer(http)
    assert written.pop("id").startswith("msg_")
    assert written.pop("timings")["predicted_n"] == 6
    assert written == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "ok: 12"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 19,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 6,
        },
    }


def test_an_answer_has_the_id_of_its_request(http):
    for stream in (True, False):
        response = ask(http, stream=stream)
        assert response.headers["request-id"] == response.headers["x-request-id"]


def test_cached_tokens_are_counted_by_themselves(http):
    answer(http, cache_salt="a")
    usage = answer(http, cache_salt="a")["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (3, 16)
    written = stream(http, cache_salt="a")
    assert start(3, num_cached_tokens=16) in written
    assert '"cache_read_input_tokens": 16' in written.partition("message_delta")[2]


def test_a_streamed_text_byte_for_byte(http):
    assert stream(http) == start(19) + text_block(0, *"ok: 12") + end("end_turn", 19, 6)


def test_a_streamed_thought_byte_for_byte(http):
    empty = '{"type": "thinking", "thinking": "", "signature": ""}'
    deltas = [f'{{"type": "thinking_delta", "thinking": "{text}"}}' for text in "?!"]
    signature = '{"type": "signature_delta", "signature": "unsigned"}'
    expected = start(19) + block(0, empty, *deltas, signature) + text_block(1, "1", "2")
    counted = ', "output_tokens_details": {"thinking_tokens": 4}'
    assert stream(http, "#2") == expected + end("end_turn", 19, 10, counted=counted)


@pytest.mark.parametrize("fields", [{"max_tokens": 3}, {"stop_sequences": [" "]}])
def test_a_cut_stream_byte_for_byte(http, fields):
    if "max_tokens" in fields:
        expected = text_block(0, *"ok:") + end("max_tokens", 19, 3)
    else:
        expected = text_block(0, *"ok:") + end("stop_sequence", 19, 4, sequence='" "')
    assert stream(http, **fields) == start(19) + expected


def test_an_error_in_the_middle_of_a_stream_is_an_event(http):
    written = stream(http, "#3")
    before, _, error = written.partition("event: error\ndata: ")
    deltas = ('{"type": "text_delta", "text": "1"}', '{"type": "text_delta", "text": "2"}')
    begun = block(0, '{"type": "text", "text": ""}', *deltas)
    assert before == start(19) + begun[: begun.index("event: content_block_stop")]
    assert error.endswith("\n\n")
    body = json.loads(error)
    assert body["type"] == "error"
    assert body["error"]["type"] == "api_error"
    assert "ValueError: the script says so" in body["error"]["message"]
    assert body["request_id"]


def test_a_streamed_tool_use_byte_for_byte(http):
    written = stream(http, "#5", tools=TOOLS, max_tokens=128)
    ids = re.findall("call_[0-9a-f]{24}", written)
    expected = start(29) + text_block(0, "1", "2")
    called = zip(ids, ("add", "sub"), ('{"a": 12}', "{}"), strict=True)
    for index, (call, name, arguments) in enumerate(called, 1):
        begun = f'{{"type": "tool_use", "id": "{call}", "name": "{name}", "input": {{}}}}'
        parts = (f'{{"type": "input_json_delta", "partial_json": {json.dumps(text)}}}' for text in arguments)
        expected += block(index, begun, *parts)
    assert written == expected + end("tool_use", 29, 116)


def test_a_whole_answer_has_the_calls_of_the_stream(http):
    written = answer(http, "#5", tools=TOOLS, max_tokens=128)
    [_, *calls] = written["content"]
    assert written["content"][0] == {"type": "text", "text": "12"}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "add", {"a": 12}), ("tool_use", "sub", {})
    ]
    assert written["stop_reason"] == "tool_use"
    cut = answer(http, "#5", tools=TOOLS, max_tokens=51)
    assert cut["stop_reason"] == "max_tokens"
    assert cut["content"][1]["input"] == {"a": 12}


def test_a_whole_answer_has_its_thought_and_its_stop(http):
    thought = {"type": "thinking", "thinking": "?!", "signature": "unsigned"}
    written = answer(http, "#2", stop_sequences=["2"])
    assert written["content"] == [thought, {"type": "text", "text": "1"}]
    assert (written["stop_reason"], written["stop_sequence"]) == ("stop_sequence", "2")
    assert written["usage"]["output_tokens_details"] == {"thinking_tokens": 4}
    hidden = {"type": "adaptive", "display": "omitted"}
    assert answer(http, "#2", thinking=hidden)["content"][0] == thought | {"thinking": ""}
    assert "thinking_delta" not in stream(http, "#2", thinking=hidden)


def test_an_answer_longer_than_the_context_ends_with_it(http):
    written = answer(http, "#4", max_tokens=100_000)
    assert written["stop_reason"] == "model_context_window_exceeded"
    assert written["usage"]["output_tokens"] == 256 - written["usage"]["input_tokens"]


def prompt(http, scripted, **fields):
    """Return the prompt that the template makes of a request, which counting tokens shows."""
    body = {"model": "tiny", **fields}
    chats = []
    model = scripted.model
    encode = model.inputs.encode
    model.inputs.encode = lambda chat, **options: chats.append(encode(chat, **options)) or chats[-1]
    try:
        response = http.post("/v1/messages/count_tokens", json=body)
    finally:
        del model.inputs.encode
    assert response.status_code == 200, response.text
    assert response.json() == {"input_tokens": len(chats[0])}
    return model.tokenizer.decode(chats[0])


def test_blocks_become_messages(http, scripted):
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]}
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "h", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "d"},
                call,
            ],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "e"}]},
    ]
    shown = prompt(http, scripted, messages=messages, system=system)
    called = '[assistant: (h)dadd{"a": 1}][tool add t1: 2]'
    assert shown == f"[system: S][user: a\nb\nc]{called}[user: e][assistant: "
    messages[-1] = {"role": "user", "content": [result | {"is_error": True}]}
    assert "[tool add t1: Error: 2]" in prompt(http, scripted, messages=messages)


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=1;"


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        (f"{BILLING}\nS", "[system: S]"),
        ([{"type": "text", "text": f"{BILLING}\n\nS"}, {"type": "text", "text": "T"}], "[system: \nS\nT]"),
        ([{"type": "text", "text": text} for text in (BILLING, "S", "T")], "[system: S\nT]"),
        (f"S\n{BILLING}", f"[system: S\n{BILLING}]"),
        (BILLING, ""),
    ],
)
def test_only_the_billing_line_of_a_system_prompt_is_left_out(http, scripted, system, shown):
    result = {"type": "tool_result", "tool_use_id": "t1", "content": f"{BILLING} 2"}
    messages = [
        {"role": "user", "content": BILLING},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    assert prompt(http, scripted, messages=messages, system=system) == (
        f"{shown}[user: {BILLING}][assistant: add{{}}][tool add t1: {BILLING} 2][assistant: "
    )


def test_a_last_turn_of_the_assistant_is_continued(http, scripted):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert prompt(http, scripted, messages=messages) == "[user: a][assistant: b"
    messages[-1]["content"] = ""
    assert prompt(http, scripted, messages=messages) == "[user: a][assistant: "


@pytest.mark.parametrize(
    ("thinking", "ending"),
    [({"type": "disabled"}, "-"), ({"type": "adaptive"}, ""), ({"type": "enabled", "budget_tokens": 9}, "")],
)
def test_thinking_is_turned_off_by_the_template(http, scripted, thinking, ending):
    messages = [{"role": "user", "content": "a"}]
    assert prompt(http, scripted, messages=messages, thinking=thinking) == f"[user: a][assistant: {ending}"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/messages", {"output_config": {"effort": "low"}}),
        ("/v1/chat/completions", {"reasoning_effort": "low"}),
        ("/v1/responses", {"reasoning": {"effort": "low"}}),
    ],
)
def test_the_effort_reaches_a_template_that_has_the_variable(http, path, field):
    messages = [{"role": "user", "content": "#1"}]
    body = {"input" if "responses" in path else "messages": messages, "max_tokens": 64, **field}
    if "responses" in path:
        del body["max_tokens"]
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "x-genserve-ignored" not in response.headers
    usage = response.json()["usage"]
    count = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert count == 19 + len("(low)")


def test_a_thinking_budget_ends_the_thought(http):
    written = answer(http, "#2", thinking={"type": "enabled", "budget_tokens": 1})
    assert written["content"][0]["type"] == "thinking"


def test_an_answer_has_the_required_form(tiny_server):
    """With the sampling of a model, which the grammar restricts."""
    form = {"type": "json_schema", "schema": {"enum": ["12"]}}
    with httpx2.Client(base_url=tiny_server.url, timeout=60) as http:
        for fields in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
            response = ask(http, **fields, thinking={"type": "enabled", "budget_tokens": 1024})
            [content] = response.json()["content"]
            assert content["text"] == '"12"'
            ignored = "thinking,output_config.effort" if "output_config" in fields else "thinking"
            assert response.headers["x-genserve-ignored"] == ignored


RESULT = {"type": "tool_result", "tool_use_id": "1"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"system": [{"type": "image"}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text.text"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "turn"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"seed": -1}, "seed"),
    ],
)
def test_invalid_fields_are_rejected_in_anthropics_form(http, change, message):
    response = ask(http, **change)
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert message in body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"]


def test_an_unknown_model_is_not_found(http):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = http.post(
            path, json={"model": "no", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        )
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found_error"


def test_fields_without_effect_are_named(http):
    response = ask(http, metadata={"user_id": "u"}, service_tier="auto", thinking={"type": "adaptive"})
    assert response.headers["x-genserve-ignored"] == "metadata,service_tier"
