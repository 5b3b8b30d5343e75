"""The Responses API over a real socket: golden streams, openai-python, bad requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseItemList,
)
from pydantic import BaseModel

from genserve.prompt import Chat, Message, Tool, ToolCall
from genserve.server.dialects.openai.response_store import ResponseStore
from genserve.server.dialects.openai.responses_body import ResponseRequest, ResponsesBody
from genserve.server.http import sse_response
from genserve.server.http.connection_errors import BodyTooLarge
from tests.support.answer_timings import without_timings
from tests.support.live_server import LiveServer
from tests.support.response_events import EVENTS, assert_typed, events_of
from tests.support.scripted_model import FAILS, scripted_repository
from tests.support.step_gate import StepGate

RECORDED = Path(__file__).with_name("recorded")
TEXT, THOUGHT, FAILURE, OBJECT, CALLS, CALLED, ENDED, SHIFTS = "12345678"
SCRIPTS = {
    TEXT: "Hello \u00e9.",
    THOUGHT: "<think>\nhm, <thin\n</think>\n\nno.",
    FAILURE: f"<think>a</think>so{FAILS}",
    OBJECT: '{"name": "Bob", "age": 5}',
    CALLS: "<think>hm</think>Wait.\n<tool_call>\n"
    '{"name": "look", "arguments": {"place": "here"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "look", "arguments": {"place": "there"}}\n</tool_call>',
    CALLED: "It is there.",
    ENDED: "<think>hm</think>\n\nok \u20ac<|im_end|>",
    SHIFTS: "1<<2",
}
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n<tool_call>' }}
{%- for tool in tools %}{{ tool.function.name + ' ' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{ '[' + message.reasoning_content + ']' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MESSAGE = {"role": "user", "content": TEXT}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look somewhere.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("scripted") / "repository"
    with LiveServer(scripted_repository(tiny_repository, root, SCRIPTS, template=TEMPLATE)) as server:
        yield server


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def create(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/responses", json={"input": TEXT, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(http: httpx2.Client, **body: Any) -> str:
    answer = http.post("/v1/responses", json={"input": TEXT, "stream": True, **body})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer.text


def without_ids(text: str) -> str:
    """Number the ids in their order, and clear the times."""
    numbers: dict[str, int] = {}
    named = re.sub(
        r"\b(resp|msg|rs|fc|call)_[0-9a-f]{24,32}\b",
        lambda found: f"{found[1]}_{numbers.setdefault(found[0], len(numbers))}",
        text,
    )
    return without_timings(re.sub(r'("(?:created|completed)_at"): \d{10}\b', r"\1: 0", named))


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("text", {"input": TEXT}),
        ("reasoning", {"input": THOUGHT}),
        ("incomplete", {"input": THOUGHT, "max_output_tokens": 4}),
        ("calls", {"input": CALLS, "tools": [LOOK]}),
        ("failed", {"input": FAILURE}),
    ],
)
def test_a_stream_has_the_recorded_bytes_and_the_types_of_openai(http, name, body):
    text = stream(http, **body, cache_salt=name)  # no cached tokens, whatever ran before
    assert without_ids(text) == (RECORDED / f"responses_{name}.sse").read_text(encoding="utf-8")
    events = events_of(text)
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        assert_typed(EVENTS[event["type"]], event)


@pytest.mark.parametrize(
    "body",
    [
        {"input": TEXT},
        {"input": THOUGHT},
        {"input": THOUGHT, "max_output_tokens": 4},
        {"input": CALLS, "tools": [LOOK]},
        {"input": CALLS, "tools": [LOOK], "max_output_tokens": 60},
    ],
)
def test_a_whole_response_is_what_the_last_event_of_its_stream_has(http, body):
    whole = create(http, **body)
    assert_typed(Response, whole)
    last = events_of(stream(http, **body))[-1]["response"]
    for response in (whole, last):
        del response["usage"]["input_tokens_details"]  # depends on earlier requests
    assert without_ids(json.dumps(whole)) == without_ids(json.dumps(last))


def test_reasoning_is_an_item_and_its_tokens_are_counted(http, server):
    response = create(http, input=THOUGHT)
    reasoning, message = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm, <thin"}]
    assert message["content"][0]["text"] == "no."
    encode = server.model.tokenizer.encode
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(encode("\nhm, <thin\n"))


@pytest.mark.parametrize("remembers", [True, False])
def test_the_client_runs_a_loop_of_function_calls(client, server, remembers):
    first = client.responses.create(model="tiny", input=CALLS, tools=[LOOK], store=remembers)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"place": "here"}, {"place": "there"}]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"nothing. {CALLED}"}
        for call in calls
    ]
    if remembers:
        second = client.responses.create(
            model="tiny", input=results, tools=[LOOK], previous_response_id=first.id
        )
    else:
        items = [{"role": "user", "content": CALLS}, *first.output, *results]
        second = client.responses.create(model="tiny", input=items, tools=[LOOK], store=False)
    assert second.output_text == SCRIPTS[CALLED]
    messages = (
        Message(role="user", content=CALLS),
        Message(
            role="assistant",
            content="Wait.",
            reasoning_content="hm",
            tool_calls=tuple(
                ToolCall(id=call.call_id, name="look", arguments=call.arguments) for call in calls
            ),
        ),
        *(
            Message(role="tool", content=f"nothing. {CALLED}", tool_call_id=call.call_id, name="look")
            for call in calls
        ),
    )
    tool = Tool(name="look", description=LOOK["description"], parameters=LOOK["parameters"])
    prompt = server.model.tokenizer.encode_chat(Chat(messages=messages, tools=(tool,)))
    assert second.usage.input_tokens == len(prompt)


def test_a_response_repeats_the_parameters_of_its_request(http):
    asked = {
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "key",
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "me",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "none",
        "top_p": 0.5,
        "truncation": "auto",
        "user": "you",
    }
    response = create(http, **asked)
    assert {name: response[name] for name in asked} == asked
    assert_typed(Response, response)


def test_fields_without_effect_are_named_in_the_header(http):
    body = {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "service_tier": "auto", "colour": 1}
    answer = http.post("/v1/responses", json={"input": TEXT, **body})
    assert answer.headers["x-genserve-ignored"] == "colour,service_tier,text.verbosity,reasoning.effort"


def test_the_clients_stream_helper_collects_the_response(client):
    with client.responses.stream(model="tiny", input=THOUGHT) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert final.output_text == "no."
    assert final.output[0].content[0].text == "hm, <thin"


@pytest.fixture
def gate(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepGate]:
    """A shut gate, while pings are due at once."""
    monkeypatch.setattr(sse_response, "PING_S", 0.01)
    gate = StepGate(server.model)
    gate.shut()
    yield gate
    gate.remove()


def test_the_client_waits_for_a_late_first_token(client, gate):
    kinds = []
    with client.responses.stream(model="tiny", input=THOUGHT) as stream:
        for event in stream:
            kinds.append(event.type)
            if kinds.count("keepalive") == 2:
                gate.open()
        final = stream.get_final_response()
    assert kinds[:4] == ["response.created", "response.in_progress", "keepalive", "keepalive"]
    assert kinds.count("response.created") == 1
    assert final.output_text == "no."

    gate.shut()
    numbers = []
    for event in client.responses.create(model="tiny", input=TEXT, stream=True):
        numbers.append(event.sequence_number)
        if event.type == "keepalive":
            gate.open()
    assert numbers == [*range(len(numbers))]
    assert event.response.output_text == SCRIPTS[TEXT]


def test_a_failure_before_a_late_first_token_is_an_event(client, gate):
    kinds = []
    for event in client.responses.create(model="tiny", input="no key", stream=True):
        kinds.append(event.type)
        if kinds.count("keepalive") == 2:
            gate.open()
    without_pings = [kind for kind in kinds if kind != "keepalive"]
    assert without_pings == ["response.created", "response.in_progress", "error", "response.failed"]
    assert event.response.error.code == "server_error"


class Person(BaseModel):
    name: str
    age: int


def test_the_client_parses_structured_text(client):
    parsed = client.responses.parse(model="tiny", input=OBJECT, text_format=Person)
    assert parsed.output_parsed == Person(name="Bob", age=5)


def test_a_response_is_stored_until_it_is_deleted(client):
    created = client.responses.create(model="tiny", input=TEXT)
    assert client.responses.retrieve(created.id) == created
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(created.id)
    client.responses.delete(created.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(created.id)
    with pytest.raises(openai.NotFoundError):
        list(client.responses.input_items.list(created.id))


def test_a_response_of_a_stream_is_stored_with_its_last_event(client):
    events = client.responses.create(model="tiny", input=TEXT, stream=True)
    final = list(events)[-1].response
    assert client.responses.retrieve(final.id) == final


def test_a_response_is_not_stored_if_the_request_says_so(client):
    created = client.responses.create(model="tiny", input=TEXT, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.id)


def test_a_response_continues_an_earlier_one_without_its_instructions(http, server):
    first = create(http, input=THOUGHT, instructions="Rhyme.")
    second = create(http, input=TEXT, previous_response_id=first["id"], instructions="Sing.")
    messages = (
        Message(role="system", content="Sing."),
        Message(role="user", content=THOUGHT),
        Message(role="assistant", content="no.", reasoning_content="hm, <thin"),
        Message(role="user", content=TEXT),
    )
    expected = server.model.tokenizer.encode_chat(Chat(messages=messages))
    assert second["usage"]["input_tokens"] == len(expected)


def test_a_response_can_be_continued_after_the_earlier_ones_are_deleted(client):
    first = client.responses.create(model="tiny", input=TEXT)
    second = client.responses.create(model="tiny", input=OBJECT, previous_response_id=first.id)
    client.responses.delete(first.id)
    third = client.responses.create(model="tiny", input=TEXT, previous_response_id=second.id)
    texts = [item.content[0].text for item in client.responses.input_items.list(third.id, order="asc")]
    assert texts == [TEXT, SCRIPTS[TEXT], OBJECT, SCRIPTS[OBJECT], TEXT]


def test_an_item_of_a_stored_response_can_be_referenced(http):
    first = create(http, input=THOUGHT)
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    user = {"role": "user", "content": TEXT}
    by_reference = create(http, input=[user, *references, user])
    whole = create(http, input=[user, *first["output"], user])
    assert by_reference["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


def test_input_items_come_in_pages(http):
    inputs = [{"role": "user", "content": text} for text in ("1", "2", "4")]
    url = f"/v1/responses/{create(http, input=inputs)['id']}/input_items"
    newest = http.get(url, params={"limit": 2}).json()
    assert_typed(ResponseItemList, newest)
    assert [item["content"][0]["text"] for item in newest["data"]] == ["4", "2"]
    assert newest["has_more"]
    rest = http.get(url, params={"after": newest["last_id"]}).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["1"]
    assert not rest["has_more"]
    assert http.get(url, params={"after": "msg_none"}).json()["error"]["param"] == "after"
    rejected = http.get(url, params={"limit": 0})
    assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "limit")


def test_a_message_that_is_incomplete_is_continued(http):
    items = [MESSAGE, {"role": "assistant", "content": "Well", "status": "incomplete"}]
    continued = create(http, input=items)["usage"]["input_tokens"]
    items[1]["status"] = "completed"
    assert continued < create(http, input=items)["usage"]["input_tokens"]


def test_an_incomplete_response_can_be_continued(http):
    cut = create(http, input=TEXT, max_output_tokens=2)
    [item] = cut["output"]
    assert (cut["status"], item["status"]) == ("incomplete", "incomplete")
    continued = create(http, input=[], previous_response_id=cut["id"])
    expected = create(http, input=[MESSAGE, item])
    assert continued["usage"]["input_tokens"] == expected["usage"]["input_tokens"]


def test_a_call_that_a_stop_string_cuts_is_incomplete(http):
    cut = create(http, input=CALLS, tools=[LOOK], stop=["there"])
    assert [item.get("status") for item in cut["output"][-2:]] == ["completed", "incomplete"]
    assert create(http, input=[MESSAGE], previous_response_id=cut["id"])["status"] == "completed"
    tool = {"type": "function", "function": {"name": "look", "parameters": LOOK["parameters"]}}
    messages = [{"role": "user", "content": CALLS}]
    for stop, reason in (("there", "stop"), ("\n</tool_call>\n", "tool_calls")):
        body = {"messages": messages, "tools": [tool], "stop": stop}
        [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == reason


def test_reasoning_without_a_text_leaves_no_message(http):
    empty = {"type": "reasoning", "summary": [], "encrypted_content": "secret"}
    with_it = create(http, input=[MESSAGE, empty, MESSAGE])
    without = create(http, input=[MESSAGE, MESSAGE])
    assert with_it["usage"]["input_tokens"] == without["usage"]["input_tokens"]


def test_a_conversation_larger_than_a_body_may_be_is_rejected():
    store = ResponseStore(max_bytes=10**6)
    store.add({"id": "resp_1", "output": []}, inputs=[], num_earlier=0)
    body = ResponsesBody.model_validate({"input": TEXT, "previous_response_id": "resp_1"})
    with pytest.raises(BodyTooLarge) as caught:
        ResponseRequest(body=body, store=store, max_bytes=100).prompts()
    assert caught.value.field == "previous_response_id"


@pytest.mark.parametrize(
    ("choice", "mode", "allowed", "several"),
    [
        (None, "auto", (), True),
        ("required", "required", (), True),
        ({"type": "function", "name": "f"}, "required", ("f",), False),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
         "required", ("f",), True),
    ],
)  # fmt: skip
def test_the_choice_among_tools_reaches_the_chat(choice, mode, allowed, several):
    body = ResponsesBody.model_validate({"input": TEXT, "tools": [TOOL, LOOK], "tool_choice": choice})
    [chat] = ResponseRequest(body=body, store=ResponseStore(max_bytes=0), max_bytes=0).prompts()
    assert [tool.name for tool in chat.tools] == ["f", "look"]
    assert (chat.tool_choice, chat.allowed_tools, chat.parallel_tool_calls) == (mode, allowed, several)


def test_the_oldest_turns_of_an_input_that_is_too_long_are_left_out_on_request(http, server):
    call = CALL | {"name": "look"}
    turns = [MESSAGE | {"content": f"{text} " * 40 + TEXT} for text in "abc"]
    answer = {"role": "assistant", "content": "d"}
    first, second, third = turns
    developer = {"role": "developer", "content": "S"}
    items = [developer, first, call, OUTPUT | {"output": "e"}, answer, second, third]
    body = {"input": items, "instructions": "Be brief.", "max_output_tokens": 16}
    rejected = http.post("/v1/responses", json=body)
    assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "input")
    cut = http.post("/v1/responses", json=body | {"truncation": "auto"})
    assert cut.status_code == 200, cut.text
    kept = create(http, **body | {"input": [items[0], second, third]})["usage"]["input_tokens"]
    assert cut.json()["usage"]["input_tokens"] == kept <= 256 - 16
    messages = ResponseRequest(
        body=ResponsesBody.model_validate(body), store=ResponseStore(max_bytes=0), max_bytes=0
    ).prompts()
    whole = len(server.model.tokenizer.encode_chat(messages[0]))
    assert cut.headers["x-genserve-truncated"] == str(whole - kept)
    fits = http.post("/v1/responses", json=body | {"input": TEXT, "truncation": "auto"})
    assert "x-genserve-truncated" not in fits.headers
    alone = http.post("/v1/responses", json={"input": "word " * 300 + TEXT, "truncation": "auto"})
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "input")


def test_log_probabilities_are_those_of_the_message(tiny_server):
    include = ["message.output_text.logprobs"]
    body = {"input": "hi", "temperature": 0, "max_output_tokens": 8, "include": include, "top_logprobs": 2}
    with httpx2.Client(base_url=tiny_server.url, timeout=60) as http:
        response = create(http, **body)
        events = events_of(stream(http, **body))
        chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}
        answer = http.post("/v1/chat/completions", json=chat | {"logprobs": True, "top_logprobs": 2}).json()
    assert_typed(Response, response)
    [part] = response["output"][0]["content"]
    scored = answer["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in part["logprobs"]] == [one["logprob"] for one in scored]
    assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    for event in events:
        assert_typed(EVENTS[event["type"]], event)
    streamed = [one["logprob"] for event in deltas for one in event["logprobs"]]
    assert streamed == [one["logprob"] for one in part["logprobs"]]


CHAT_LOOK = {"type": "function", "function": {name: LOOK[name] for name in ("name", "parameters")}}


@pytest.mark.parametrize(
    ("said", "content", "options"),
    [
        (TEXT, "Hello", {"stop": [" \u00e9"]}),
        (THOUGHT, "no.", {}),
        pytest.param(THOUGHT, "n", {"stop": ["o."]}, marks=pytest.mark.extended),
        pytest.param(ENDED, "ok \u20ac", {}, marks=pytest.mark.extended),
        (ENDED, "ok \u20ac", {"stream_interval": 7}),
        (SHIFTS, "1<<2", {"tools": [CHAT_LOOK]}),
        pytest.param(CALLS, "Wait.", {"tools": [CHAT_LOOK]}, marks=pytest.mark.extended),
        (CALLS, "Wait.", {"tools": [CHAT_LOOK], "stream_interval": 50}),
    ],
)
def test_the_log_probabilities_of_a_message_are_those_of_its_content(http, said, content, options):
    body = {"messages": [{"role": "user", "content": said}], "logprobs": True, "top_logprobs": 1, **options}
    chat = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert chat["message"]["content"] == content
    entries = chat["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode().startswith(content)
    assert "".join(entry["token"] for entry in entries) == content
    blocks = http.post("/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(block[6:])["choices"][0] for block in blocks if block.startswith("data: {")]
    for chunk in chunks:
        named = "".join(entry["token"] for entry in (chunk["logprobs"] or {"content": []})["content"])
        assert chunk["delta"].get("content", "") in ("", named)
    scored = (chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"])
    assert [entry for listed in scored for entry in listed] == entries
    if "stop" not in options:  # Responses has none
        tools = {"tools": [LOOK]} if "tools" in options else {}
        include = ["message.output_text.logprobs"]
        response = create(http, input=said, include=include, top_logprobs=1, **tools)
        [message] = [item for item in response["output"] if item["type"] == "message"]
        [part] = message["content"]
        assert [one["bytes"] for one in part["logprobs"]] == [entry["bytes"] for entry in entries]
    ids = http.post("/v1/chat/completions", json={**body, "return_token_ids": True}).json()["choices"][0]
    assert len(ids["logprobs"]["content"]) == len(ids["token_ids"]), "vLLM's field asks for all tokens"


def test_nothing_is_stored_if_the_store_has_no_size(tiny_repository):
    with LiveServer(tiny_repository, response_store_byte_size=0) as server:
        body = {"input": "hi", "max_output_tokens": 1}
        response = httpx2.post(f"{server.url}/v1/responses", json=body).json()
        assert response["store"] is False
        assert httpx2.get(f"{server.url}/v1/responses/{response['id']}").status_code == 404


@pytest.mark.parametrize(
    ("change", "param", "status"),
    [
        ({"model": "nobody"}, "model", 404),
        ({"input": None}, "input", 400),
        ({"input": []}, "input", 400),
        ({"input": 3}, "input", 400),
        ({"input": [3]}, "input[0]", 400),
        ({"input": [{"type": "message", "content": "hi"}]}, "input[0].role", 400),
        ({"input": [{"role": "tool", "content": "hi"}]}, "input[0].role", 400),
        ({"input": [{"role": "user"}]}, "input[0].content", 400),
        ({"input": [MESSAGE, {"role": "user", "content": [{"type": "input_image"}]}]},
         "input[1].content[0]", 400),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", 400),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input", 400),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input", 400),
        ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input[0].action", 400),
        ({"input": [{"type": "apply_patch_call", "call_id": "c"}]}, "input[0].operation", 400),
        ({"input": [{"type": "tool_search_call", "call_id": "c", "arguments": "{}"}]},
         "input[0].arguments", 400),
        ({"input": [{"type": "tool_search_output", "call_id": "c"}]}, "input[0].tools", 400),
        ({"input": [MESSAGE, {"type": "additional_tools", "tools": [{"type": "function"}]}]},
         "input[1].tools[0].name", 400),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", 400),
        ({"input": [CALL, OUTPUT]}, "input[1].output", 400),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input[0].id", 404),
        ({"input": [{}]}, "input[0]", 400),
        ({"previous_response_id": "resp_none"}, "previous_response_id", 400),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", 400),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0].type", 400),
        ({"tools": [TOOL, {"type": "namespace", "name": "n", "tools": [LOOK | {"parameters": {"type": []}}]}],
          "tool_choice": "required"}, "tools[1].tools[0].parameters", 400),
        ({"tools": [{"type": "function"}]}, "tools[0].name", 400),
        ({"tools": [{"type": "custom"}]}, "tools[0].name", 400),
        ({"tools": [{"type": "namespace", "tools": [TOOL]}]}, "tools[0].name", 400),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
         "tools[0].tools[0].name", 400),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", 400),
        ({"tools": [TOOL, TOOL]}, "tools", 400),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", 400),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", 400),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", 400),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [3]}},
         "tool_choice", 400),
        ({"tool_choice": "required"}, "tool_choice", 400),
        ({"text": {"format": {"type": "xml"}}}, "text.format", 400),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", 400),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", 400),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 3}}}, "text.format.schema", 400),
        ({"reasoning": {"effort": "<|im_end|>"}}, "reasoning.effort", 400),
        ({"max_output_tokens": 0}, "max_output_tokens", 400),
        ({"top_logprobs": 21}, "top_logprobs", 400),
        ({"temperature": -1}, "temperature", 400),
        ({"truncation": "some"}, "truncation", 400),
        ({"background": True}, "background", 400),
        ({"conversation": "conv_1"}, "conversation", 400),
        ({"prompt": {"id": "p"}}, "prompt", 400),
        ({"max_tokens": 3}, "max_tokens", 400),
        ({"response_format": {"type": "json_object"}}, "response_format", 400),
        ({"messages": [MESSAGE]}, "messages", 400),
    ],
)  # fmt: skip
def test_a_bad_request_is_a_4xx_that_names_the_field(http, change, param, status):
    for streams in (False, True):
        answer = http.post("/v1/responses", json={"input": TEXT, "stream": streams, **change})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"]


def test_a_missing_earlier_response_has_the_code_of_openai(http):
    answer = http.post("/v1/responses", json={"input": "hi", "previous_response_id": "resp_none"})
    assert answer.json()["error"]["code"] == "previous_response_not_found"
