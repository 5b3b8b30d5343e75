"""Google's dialect over models that write given answers, asked by Google's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import pydantic
import pytest
from google import genai
from google.genai import errors, types

from genserve.server.dialects.gemini.body import json_schema
from tests.support.live_server import LiveServer
from tests.support.scripted_model import SCRIPTS, scripted_repository

# Shows what it is given; `enable_thinking` is a variable, as in Qwen's.
TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}"
    "{% if m.name %} {{ m.name }}{% endif %}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant: {% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}"
    "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}"
)
NUMBER = {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}, "required": ["a"]}
TOOLS = [{"functionDeclarations": [{"name": "add", "parameters": NUMBER}, {"name": "sub"}]}]
CALLS = {"#7": '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'}
PATH = "/v1beta/models/tiny:generateContent"


@pytest.fixture(scope="module")
def scripted(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("gemini") / "repository"
    with LiveServer(scripted_repository(tiny_repository, root, SCRIPTS | CALLS, template=TEMPLATE)) as server:
        yield server


@pytest.fixture
def http(scripted: LiveServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=scripted.url, timeout=60) as client:
        yield client


def google(server: LiveServer) -> genai.Client:
    options = types.HttpOptions(base_url=server.url, api_version="v1beta")
    return genai.Client(api_key="none", http_options=options)


@pytest.fixture(scope="module")
def client(scripted: LiveServer) -> Iterator[genai.Client]:
    with google(scripted) as client:
        yield client


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": [*parts]}


def body(text: str = "#1", **config: Any) -> dict[str, Any]:
    return {"contents": [user({"text": text})], "generationConfig": config}


def answer(http: httpx2.Client, fields: dict[str, Any]) -> Any:
    response = http.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_client_reads_a_whole_answer(client):
    answer = client.models.generate_content(model="tiny", contents="#1")
    assert answer.text == "ok: 12"
    assert answer.candidates[0].finish_reason is types.FinishReason.STOP
    usage = answer.usage_metadata
    assert (usage.candidates_token_count, usage.thoughts_token_count) == (6, None)
    assert usage.total_token_count == usage.prompt_token_count + 6
    assert answer.model_version == "tiny"
    assert answer.response_id


def test_the_client_reads_a_stream(client):
    parts = list(client.models.generate_content_stream(model="tiny", contents="#1"))
    assert "".join(part.text or "" for part in parts) == "ok: 12"
    assert len(parts) > 2
    assert [part.candidates[0].finish_reason for part in parts if part.usage_metadata] == ["STOP"]
    assert len({part.response_id for part in parts}) == 1


@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
async def test_the_asynchronous_client_reads_a_stream(scripted):
    with google(scripted) as both:
        async with both.aio as client:
            stream = await client.models.generate_content_stream(model="tiny", contents="#1")
            assert "".join([part.text or "" async for part in stream]) == "ok: 12"


@pytest.mark.parametrize("query", ["", "?alt=json"])
def test_without_server_sent_events_a_stream_is_a_json_array(http, query):
    path = f"/v1beta/models/tiny:streamGenerateContent{query}"
    response = http.post(path, json=body("#1"))
    assert response.headers["content-type"].startswith("application/json")
    texts = [part["text"] for item in response.json() for part in item["candidates"][0]["content"]["parts"]]
    assert "".join(texts) == "ok: 12"
    *items, failed = http.post(path, json=body("#3")).json()
    assert len(items) == 2
    assert (failed["error"]["code"], failed["error"]["status"]) == (500, "INTERNAL")


def test_a_chat_of_the_client_sends_its_history(client, scripted, prompts):
    chat = client.chats.create(model="tiny")
    assert chat.send_message("#1").text == "ok: 12"
    assert "".join(part.text or "" for part in chat.send_message_stream("#1")) == "ok: 12"
    assert prompts[-1] == "[user: #1][assistant: ok: 12][user: #1][assistant: "
    chat.send_message("#1")
    assert prompts[-1].endswith("[user: #1][assistant: ok: 12][user: #1][assistant: ")


def test_the_client_calls_a_function_and_sends_its_result(client, prompts):
    called = []

    def add(a: int) -> int:
        """Add one."""
        called.append(a)
        return a + 1

    config = {"tools": [add], "automatic_function_calling": {"maximum_remote_calls": 2}}
    client.chats.create(model="tiny", config=config).send_message("#7")
    assert called[0] == 7
    assert prompts[-1].startswith("<tool_call>[user: #7][assistant: call_")
    assert 'add{"a": 7}]' in prompts[-1]
    assert prompts[-1].endswith(': {"result": 8}][assistant: ')


@pytest.mark.parametrize("streams", [False, True])
def test_calls_come_whole(client, streams):
    ask = client.models.generate_content_stream if streams else client.models.generate_content
    answers = ask(model="tiny", contents="#5", config={"tools": TOOLS})
    parts = [part for one in (answers if streams else [answers]) for part in one.candidates[0].content.parts]
    calls = [part.function_call for part in parts if part.function_call]
    assert [(call.name, call.args) for call in calls] == [("add", {"a": 12}), ("sub", {})]
    assert all(call.id for call in calls)
    assert "".join(part.text or "" for part in parts).strip() == "12"


def test_a_call_can_be_required(client):
    choice = {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["add"]}}
    config = {"tools": TOOLS, "tool_config": choice}
    [call] = client.models.generate_content(model="tiny", contents="#7", config=config).function_calls
    assert (call.name, call.args) == ("add", {"a": 7})


@pytest.mark.parametrize(
    ("mode", "ours"), [("ANY", "required"), ("NONE", "none"), ("AUTO", "auto"), ("VALIDATED", "auto")]
)
def test_a_mode_of_function_calling_is_a_tool_choice(mode, ours):
    from genserve.server.dialects.gemini.body import GenerateContentBody

    choice = {"functionCallingConfig": {"mode": mode, "allowedFunctionNames": ["sub"]}}
    read = GenerateContentBody.model_validate(body() | {"tools": TOOLS, "toolConfig": choice})
    chat = read.chat()
    assert (chat.tool_choice, chat.allowed_tools) == (ours, ("sub",))


def test_a_call_that_is_cut_off_is_left_out(client):
    config = {"tools": TOOLS, "max_output_tokens": 40}
    cut = client.models.generate_content(model="tiny", contents="#5", config=config)
    assert cut.function_calls is None
    assert cut.candidates[0].finish_reason is types.FinishReason.MAX_TOKENS


class City(pydantic.BaseModel):
    """What a model is to write."""

    size: Literal["12"] | None
    name: Literal["ok"]


def test_an_answer_has_the_form_of_a_schema(tiny_server):
    form = {"response_mime_type": "application/json", "max_output_tokens": 100}
    with google(tiny_server) as client:
        for schema in ({"response_schema": City}, {"response_json_schema": City.model_json_schema()}):
            answer = client.models.generate_content(model="tiny", contents="a", config=form | schema)
            assert City.model_validate_json(answer.text).name == "ok"
            assert [*json.loads(answer.text)] == ["size", "name"]
        texts = {"type": "STRING", "enum": ["x", "y"]}
        enum = {"response_mime_type": "text/x.enum", "response_schema": texts}
        assert client.models.generate_content(model="tiny", contents="a", config=enum).text in ("x", "y")
        text = client.models.generate_content(model="tiny", contents="a", config=form).text
        assert text.startswith("{")


def test_a_schema_of_google_is_a_json_schema():
    schema = {
        "type": "OBJECT",
        "properties": {
            "a": {"type": "ARRAY", "min_items": "1", "items": {"type": "INTEGER", "format": "int32"}},
            "type": {"type": "STRING", "format": "date", "nullable": True, "example": "2000-01-01"},
            "c": {"anyOf": [{"type": "NUMBER"}, {"type": "STRING", "format": "enum", "enum": ["OBJECT"]}]},
        },
        "propertyOrdering": ["c", "missing", "type"],
    }
    expected = {
        "type": "object",
        "properties": {
            "c": {"anyOf": [{"type": "number"}, {"type": "string", "enum": ["OBJECT"]}]},
            "type": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
            "a": {"type": "array", "minItems": 1, "items": {"type": "integer"}},
        },
    }
    assert json_schema(schema) == expected
    assert [*json_schema(schema)["properties"]] == [*expected["properties"]]


def test_names_and_counts_of_other_types_in_a_schema_stay_as_they_are():
    schema = {"properties": {"a": {"minItems": "9" * 5000}}, "propertyOrdering": [["a"], {}]}
    assert json_schema(schema) == {"properties": schema["properties"]}


def test_a_count_with_too_many_digits_is_rejected(http):
    schema = {"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "9" * 5000}
    fields = body(responseMimeType="application/json", responseSchema=schema)
    assert http.post(PATH, json=fields).status_code == 400


def test_reasoning_is_hidden_unless_the_request_asks_for_it(client):
    hidden = client.models.generate_content(model="tiny", contents="#2")
    config = {"thinking_config": {"include_thoughts": True}}
    shown = client.models.generate_content(model="tiny", contents="#2", config=config)
    streamed = list(client.models.generate_content_stream(model="tiny", contents="#2", config=config))
    assert [part.text for part in hidden.candidates[0].content.parts] == ["12"]
    assert [(part.text, part.thought) for part in shown.candidates[0].content.parts] == [
        ("?!", True), ("12", None),
    ]  # fmt: skip
    thoughts = [part.text for one in streamed for part in one.candidates[0].content.parts if part.thought]
    assert "".join(thoughts) == "?!"
    for answer in (hidden, shown, streamed[-1]):
        usage = answer.usage_metadata
        assert usage.thoughts_token_count > 0
        assert usage.total_token_count == sum(
            (usage.prompt_token_count, usage.candidates_token_count, usage.thoughts_token_count)
        )


def test_several_candidates_have_one_usage(client):
    config = {"candidate_count": 2, "max_output_tokens": 2}
    whole = client.models.generate_content(model="tiny", contents="#1", config=config)
    assert [one.index for one in whole.candidates] == [0, 1]
    assert {one.finish_reason for one in whole.candidates} == {types.FinishReason.MAX_TOKENS}
    assert whole.usage_metadata.candidates_token_count == 4
    parts = list(client.models.generate_content_stream(model="tiny", contents="#1", config=config))
    [usage] = [part.usage_metadata for part in parts if part.usage_metadata]
    assert usage.candidates_token_count == 4


def test_log_probabilities_are_those_of_the_tokens(tiny_server):
    config = {"response_logprobs": True, "logprobs": 2, "temperature": 0, "max_output_tokens": 4}
    with google(tiny_server) as client:
        [whole] = client.models.generate_content(model="tiny", contents="a", config=config).candidates
        parts = list(client.models.generate_content_stream(model="tiny", contents="a", config=config))
    chosen, top = whole.logprobs_result.chosen_candidates, whole.logprobs_result.top_candidates
    assert "".join(token.token for token in chosen) == whole.content.parts[0].text
    assert [len(one.candidates) for one in top] == [2] * len(chosen)
    assert [one.candidates[0] for one in top] == chosen
    results = [part.candidates[0].logprobs_result for part in parts]
    assert [token for one in results if one for token in one.chosen_candidates] == chosen


def test_tokens_are_counted(client):
    used = client.models.generate_content(model="tiny", contents="#1").usage_metadata
    assert client.models.count_tokens(model="tiny", contents="#1").total_tokens == used.prompt_token_count


def test_the_tokens_of_a_request_are_counted(http):
    path, request = "/v1beta/models/tiny:countTokens", body("#1") | {"systemInstruction": user({"text": "a"})}
    used = answer(http, request)["usageMetadata"]["promptTokenCount"]
    counted = http.post(path, json={"generateContentRequest": {"model": "models/tiny", **request}})
    assert counted.json() == {"totalTokens": used}
    assert http.post(path, json={}).status_code == 400


def test_models_are_listed_and_described(client):
    [listed] = client.models.list()
    assert listed == client.models.get(model="tiny")
    assert (listed.name, listed.input_token_limit) == ("models/tiny", 256)
    assert listed.supported_actions == ["generateContent", "countTokens"]


@pytest.mark.parametrize(
    ("model", "config", "code", "status"),
    [
        ("huge", {}, 404, "NOT_FOUND"),
        ("tiny", {"top_p": 2}, 400, "INVALID_ARGUMENT"),
        ("tiny", {"cached_content": "cachedContents/1"}, 400, "INVALID_ARGUMENT"),
        ("tiny", {"tools": [{"google_search": {}}]}, 400, "INVALID_ARGUMENT"),
        ("tiny", {"response_modalities": ["IMAGE"]}, 400, "INVALID_ARGUMENT"),
        ("tiny", {"speech_config": {"language_code": "de"}}, 400, "INVALID_ARGUMENT"),
    ],
    ids=str,
)
def test_the_client_raises_the_error(client, model, config, code, status):
    for ask in (client.models.generate_content, client.models.generate_content_stream):
        with pytest.raises(errors.ClientError) as raised:
            list(ask(model=model, contents="#1", config=config))
        assert (raised.value.code, raised.value.status) == (code, status)
        assert raised.value.details["error"].keys() == {"code", "message", "status"}


def test_the_client_raises_an_error_in_the_middle_of_a_stream(client):
    read = []
    with pytest.raises(errors.ServerError) as raised:
        read.extend(client.models.generate_content_stream(model="tiny", contents="#3"))
    assert (raised.value.code, raised.value.status) == (500, "INTERNAL")


def test_an_unknown_path_has_an_error_of_google(http):
    response = http.post("/v1beta/models/tiny:embedContent", json={})
    assert (response.status_code, response.json()["error"].keys()) == (405, {"code", "message", "status"})
    assert http.get("/v1beta/files").json()["error"].keys() == {"code", "message", "status"}


IMAGE = {"inlineData": {"mimeType": "image/png", "data": "YQ=="}}
CALL, RESULT = {"functionCall": {"name": "add"}}, {"functionResponse": {"name": "add"}}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"contents": [user({"text": "a"}, IMAGE)]}, "contents[0].parts[1].inlineData"),
        ({"contents": [user({})]}, "contents[0].parts[0]"),
        ({"contents": [user(CALL)]}, "contents[0].parts[0].function_call"),
        ({"contents": [{"role": "model", "parts": [RESULT]}]}, "contents[0].parts[0].function_response"),
        ({"contents": [user({"text": "a"} | RESULT)]}, "contents[0].parts[0].function_response"),
        ({"contents": []}, "contents"),
        ({"contents": [{"role": "system", "parts": [{"text": "a"}]}]}, "contents[0].role"),
        ({"systemInstruction": user(IMAGE)}, "system_instruction.parts[0].inlineData"),
        ({"cachedContent": "a"}, "cachedContent"),
        ({"cached_content": "a"}, "cached_content"),
        ({"generationConfig": {"topP": 2}}, "generation_config.top_p"),
        ({"generationConfig": {"maxOutputTokens": "2"}}, "generation_config.max_output_tokens"),
        ({"generationConfig": {"logprobs": 2}}, "generation_config.logprobs"),
        ({"generationConfig": {"candidateCount": 9}}, "generation_config.candidate_count"),
        ({"generationConfig": {"speechConfig": {"a": 1}}}, "generation_config.speechConfig"),
        ({"generationConfig": {"responseSchema": NUMBER}}, "generation_config.response_schema"),
        (
            {
                "generationConfig": {
                    "responseMimeType": "application/json",
                    "responseSchema": {"type": "OBJEKT"},
                }
            },
            "generation_config.response_schema",
        ),
        ({"tools": [{"functionDeclarations": [{"name": "a b"}]}]}, "function_declarations[0].name"),
        ({"tools": [{"codeExecution": {}}]}, "tools[0].codeExecution"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "tool_config"),
    ],
    ids=str,
)
def test_a_wrong_field_is_rejected_by_its_name(http, fields, place):
    response = http.post(PATH, json=body("#1") | fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith((f"{place} ", f"{place}:"))


def test_fields_without_effect_are_named(http):
    fields = body("#1", temperature=0, top_k=4.0, mediaResolution="LOW", thinkingConfig={"thinkingBudget": 0})
    response = http.post(PATH, json=fields | {"safetySettings": [], "labels": None})
    assert response.status_code == 200
    ignored = set(response.headers["x-genserve-ignored"].split(","))
    assert ignored == {"safetySettings", "generation_config.mediaResolution", "generation_config.top_k"}


@pytest.fixture
def prompts(scripted: LiveServer) -> Iterator[list[str]]:
    """The prompts that the template makes of the requests of a test."""
    inputs, read = scripted.model.inputs, []
    encode = inputs.encode

    def noted(chat: Any, **limits: Any) -> Any:
        token_ids = encode(chat, **limits)
        read.append(scripted.model.tokenizer.decode(token_ids))
        return token_ids

    inputs.encode = noted
    yield read
    del inputs.encode


def test_contents_are_turns(http, prompts):
    contents = [
        user({"text": "a"}, {"text": "b"}),
        {"parts": {"text": "c"}},
        {"role": "model", "parts": [{"text": "h", "thought": True}, {"text": "d"}, CALL]},
        {"role": "model", "parts": [{"functionCall": {"id": "x", "name": "add", "args": {"a": 1}}}]},
        {"role": "function", "parts": [RESULT, {"functionResponse": {"name": "add", "response": {"b": 2}}}]},
    ]
    answer(http, {"contents": contents, "system_instruction": {"parts": [{"text": "s"}, {"text": "#1"}]}})
    assert prompts == [
        "[system: s\n\n#1][user: a\nb\nc][assistant: (h)dcall00000add{}xadd{\"a\": 1}]"
        "[tool add call00000: {}][tool add x: {\"b\": 2}][assistant: "
    ]
    answer(http, {"contents": [user({"text": "a"}), {"role": "model", "parts": [{"text": "#1"}]}]})
    assert prompts[-1] == "[user: a][assistant: #1"


def test_what_googles_servers_write_and_run_is_left_out_by_name(http, prompts):
    code = {"executableCode": {"language": "PYTHON", "code": "1"}}
    ran = {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}, "thoughtSignature": "YQ=="}
    contents = [
        user({"text": "a"}),
        {"role": "model", "parts": [code, ran, {"text": "b"}, IMAGE]},
        user({"text": "c"}),
        {"role": "model", "parts": [code]},
        user({"text": "#1"}),
    ]
    tools = [{"googleSearch": {}}, {"functionDeclarations": [{"name": "add"}], "codeExecution": {}}]
    response = http.post(PATH, json={"contents": contents, "tools": tools})
    assert response.status_code == 200, response.text
    assert response.headers["x-genserve-ignored"] == (
        "tools[0]=googleSearch,tools[1]=codeExecution,"
        "contents=executableCode,contents=codeExecutionResult,contents=inlineData"
    )
    assert prompts == ["<tool_call>[user: a][assistant: b][user: c][user: #1][assistant: "]


def test_a_placeholder_takes_the_place_of_an_image_in_a_result(http, prompts):
    result = {"functionResponse": {"name": "add", "response": {"b": 2}, "parts": [IMAGE]}}
    contents = [user({"text": "#1"}), {"role": "model", "parts": [CALL]}, user(result)]
    answer(http, {"contents": contents})
    assert '{"b": 2}\n[image left out: this model reads text only]]' in prompts[0]
    asked = http.post(PATH, json={"contents": [user(IMAGE)]})
    assert asked.status_code == 400
    assert asked.json()["error"]["message"].startswith("contents[0].parts[0].inlineData: ")


def test_thinking_is_a_variable_of_the_template(http, prompts):
    for config in ({"thinkingBudget": 0}, {"thinkingLevel": "HIGH"}, {"thinkingBudget": -1}):
        answer(http, body("#1", thinkingConfig=config))
    endings = ("[assistant: -", "[assistant: (high)", "[assistant: ")
    assert [prompt.removeprefix("[user: #1]") for prompt in prompts] == [*endings]
