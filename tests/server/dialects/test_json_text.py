"""JSON in, JSON out: what a model writes under a schema and as arguments arrives in every dialect.

A scripted model writes strings of all planes of Unicode, raw and with escapes in turn. One server answers all
requests at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from genserve.client.client import Client
from tests.support.json_strings import SPELLINGS, random_strings
from tests.support.live_server import LiveServer
from tests.support.scripted_model import scripted_repository
from tests.support.tiny_llama import tiny_llama_checkpoint

pytestmark = pytest.mark.extended   # test_json_escapes.py checks the grammars without a server
STRINGS = random_strings(300, seed=1, max_parts=2)
SCHEMA = {
    "type": "object",
    "properties": {"strings": {"type": "array", "items": {"type": "string"}}},
    "required": ["strings"],
}
TOOL = {"name": "keep", "parameters": SCHEMA}
TEMPLATE = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}[{{ m.content }}]{% endfor %}"
# What a model writes that forgets the end of its thought.
THOUGHT = '<think>hm\n<tool_call>\n{"name": "keep", "arguments": {"strings": ["\\u00e9"]}}\n</tool_call>'


def written(*, first: str, second: str) -> str:
    """The strings as JSON, in turn in two spellings."""
    spelled = (SPELLINGS[(first, second)[at % 2]](text) for at, text in enumerate(STRINGS))
    return f'{{"strings": [{", ".join(spelled)}]}}'


WHOLE, STREAMED = written(first="raw", second="escaped"), written(first="escaped", second="raw")
# By the number in the prompt; what is streamed is spelled the other way round.
SCRIPTS = {
    "#1": WHOLE,
    "#2": STREAMED,
    "#3": f'<tool_call>\n{{"name": "keep", "arguments": {WHOLE}}}\n</tool_call>',
    "#4": f'<tool_call>\n{{"name": "keep", "arguments": {STREAMED}}}\n</tool_call>',
    "#5": THOUGHT,
    "#6": "<think>hm<|im_end|>",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from genserve.export import SilentProgress, export_model

    folder = tmp_path_factory.mktemp("json")
    checkpoint = tiny_llama_checkpoint(folder / "checkpoint", context=8192)
    export_model(
        str(checkpoint), repository=folder / "tiny", name="tiny", precision="fp32", progress=SilentProgress()
    )
    root = scripted_repository(
        folder / "tiny", folder / "repository", SCRIPTS, template=TEMPLATE, tokens_per_step=8
    )
    with LiveServer(root) as server:
        yield server.url


def post(url: str, body: Mapping[str, Any]) -> Any:
    answer = httpx2.post(url, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    if not body.get("stream") and "/generate_stream" not in url:
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n")]
    return [json.loads(line) for line in lines if line[:1] == "{"]


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def chat(url: str, prompt: str, *, stream: bool, tools: bool) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "strings", "schema": SCHEMA}}
    asks = {"tools": [{"type": "function", "function": TOOL}]} if tools else {"response_format": form}
    answer = post(f"{url}/v1/chat/completions", {"messages": messages(prompt), "stream": stream, **asks})
    parts = [one["choices"][0]["delta"] for one in answer] if stream else [answer["choices"][0]["message"]]
    if not tools:
        return "".join(part.get("content") or "" for part in parts)
    calls = [call for part in parts for call in part.get("tool_calls") or ()]
    return "".join(call["function"].get("arguments", "") for call in calls)


def responses(url: str, prompt: str, *, stream: bool, tools: bool) -> str:
    form = {"format": {"type": "json_schema", "name": "strings", "schema": SCHEMA}}
    asks = {"tools": [{"type": "function", **TOOL}]} if tools else {"text": form}
    answer = post(f"{url}/v1/responses", {"input": prompt, "stream": stream, "store": False, **asks})
    if stream:
        kind = "response.function_call_arguments.delta" if tools else "response.output_text.delta"
        return "".join(event["delta"] for event in answer if event["type"] == kind)
    *_, item = answer["output"]
    return item["arguments"] if tools else item["content"][0]["text"]


def anthropic(url: str, prompt: str, *, stream: bool, tools: bool) -> str:
    tool = {"name": TOOL["name"], "input_schema": SCHEMA}
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    asks = {"tools": [tool]} if tools else {"output_config": form}
    body = {"model": "tiny", "max_tokens": 4000, "messages": messages(prompt), "stream": stream, **asks}
    answer = post(f"{url}/v1/messages", body)
    if stream:
        kind = "partial_json" if tools else "text"
        return "".join(event["delta"].get(kind, "") for event in answer if "delta" in event)
    *_, block = answer["content"]
    return json.dumps(block["input"]) if tools else block["text"]


def ollama(url: str, prompt: str, *, stream: bool, tools: bool) -> str:
    asks = {"tools": [{"type": "function", "function": TOOL}]} if tools else {"format": SCHEMA}
    body = {"model": "tiny", "messages": messages(prompt), "stream": stream, **asks}
    answer = post(f"{url}/api/chat", body)
    parts = [one["message"] for one in (answer if stream else [answer])]
    if not tools:
        return "".join(part["content"] for part in parts)
    [call] = [call for part in parts for call in part.get("tool_calls", ())]
    return json.dumps(call["function"]["arguments"])


def gemini(url: str, prompt: str, *, stream: bool, tools: bool) -> str:
    form = {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}
    declared = [{"functionDeclarations": [{"name": TOOL["name"], "parametersJsonSchema": SCHEMA}]}]
    asks = {"tools": declared} if tools else {"generationConfig": form}
    method = "streamGenerateContent" if stream else "generateContent"
    body = {"contents": {"parts": {"text": prompt}}, **asks}
    answer = post(f"{url}/v1beta/models/tiny:{method}", body)
    contents = [one["candidates"][0]["content"] for one in (answer if stream else [answer])]
    parts = [part for content in contents for part in content["parts"]]
    if not tools:
        return "".join(part["text"] for part in parts)
    [call] = [part["functionCall"] for part in parts if "functionCall" in part]
    return json.dumps(call["args"])


def sdk(url: str, prompt: str, *, stream: bool, tools: bool) -> str:
    asks: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}]} if tools else {}
    asks |= {} if tools else {"structured_outputs": {"json": SCHEMA}}
    with Client(url) as client:
        if not stream:
            answer = client.chat(prompt, **asks)
            return answer.tool_calls[0].arguments if tools else answer.text
        with client.chat_stream(prompt, **asks) as deltas:
            if not tools:
                return "".join(delta.text for delta in deltas)
            return "".join(call.arguments for delta in deltas for call in delta.tool_calls)


CHATS = (chat, responses, anthropic, ollama, gemini, sdk)


def completions(url: str, prompt: str, *, stream: bool) -> str:
    body = {"prompt": prompt, "stream": stream, "max_tokens": 4000, "structured_outputs": {"json": SCHEMA}}
    answer = post(f"{url}/v1/completions", body)
    return "".join(one["choices"][0]["text"] for one in (answer if stream else [answer]))


def tgi(url: str, prompt: str, *, stream: bool) -> str:
    parameters = {"max_new_tokens": 4000, "grammar": {"type": "json", "value": SCHEMA}}
    body = {"inputs": prompt, "parameters": parameters}
    if not stream:
        return post(f"{url}/generate", body)["generated_text"]
    return post(f"{url}/generate_stream", body)[-1]["generated_text"]


def ollama_generate(url: str, prompt: str, *, stream: bool) -> str:
    body = {"model": "tiny", "prompt": prompt, "raw": True, "stream": stream, "format": SCHEMA}
    answer = post(f"{url}/api/generate", body)
    return "".join(one["response"] for one in (answer if stream else [answer]))


def kserve(url: str, prompt: str, *, stream: bool) -> str:
    guide = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)}
    body = {"text_input": prompt, "max_tokens": 4000, **guide}
    answer = post(f"{url}/v2/models/tiny/generate{'_stream' if stream else ''}", body)
    return "".join(one["text_output"] for one in (answer if stream else [answer]))


PROMPTS = (completions, tgi, ollama_generate, kserve)

Asked = Mapping[tuple[str, bool, bool], Future[str]]


@pytest.fixture(scope="module")
def asked(url: str) -> Iterator[Asked]:
    """The answers in all dialects, by its name, whether they stream and whether they call a tool."""
    with ThreadPoolExecutor(32) as pool:
        answers = {
            (ask.__name__, stream, tools): pool.submit(
                ask, url, f"#{1 + stream + 2 * tools}", stream=stream, tools=tools
            )
            for ask in CHATS
            for stream in (False, True)
            for tools in (False, True)
        }
        for prompt in PROMPTS:
            for stream in (False, True):
                answers[prompt.__name__, stream, False] = pool.submit(
                    prompt, url, f"#{1 + stream}", stream=stream
                )
        yield answers


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [*CHATS, *PROMPTS])
def test_strings_under_a_schema_arrive_as_they_were_written(asked, ask, stream):
    text = asked[ask.__name__, stream, False].result()
    assert json.loads(text) == {"strings": STRINGS}
    assert text == (STREAMED if stream else WHOLE), "spelled as the model spelled them"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", CHATS)
def test_arguments_of_tools_arrive_as_they_were_written(asked, ask, stream):
    assert json.loads(asked[ask.__name__, stream, True].result()) == {"strings": STRINGS}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", CHATS)
def test_a_call_before_the_end_of_a_thought_arrives(url, ask, stream):
    assert json.loads(ask(url, "#5", stream=stream, tools=True)) == {"strings": ["\u00e9"]}


@pytest.mark.parametrize("tools", [(), ({"type": "function", "function": TOOL},)], ids=["no tools", "tools"])
def test_an_answer_may_end_within_its_thought(url, tools):
    answer = post(f"{url}/v1/chat/completions", {"messages": messages("#6"), "tools": tools})
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "", "reasoning_content": "hm"}


BAD = {"type": "object", "properties": {"a": {"type": "objekt"}}}
REASON = " cannot be used: properties.a.type: Invalid type: objekt"
ERRORS = {
    "chat": ("/v1/chat/completions", {"messages": messages("#5")}),
    "responses": ("/v1/responses", {"input": "#5"}),
    "anthropic": ("/v1/messages", {"model": "tiny", "max_tokens": 8, "messages": messages("#5")}),
    "ollama": ("/api/chat", {"model": "tiny", "messages": messages("#5")}),
    "gemini": ("/v1beta/models/tiny:generateContent", {"contents": {"parts": {"text": "#5"}}}),
    "completions": ("/v1/completions", {"prompt": "#5"}),
    "tgi": ("/generate", {"inputs": "#5"}),
}


FORM, FUNCTION = {"name": "a", "schema": BAD}, {"name": "f", "parameters": BAD}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize(
    ("dialect", "fields", "place"),
    [
        ("chat", {"response_format": {"type": "json_schema", "json_schema": FORM}}, "response_format"),
        ("responses", {"text": {"format": {"type": "json_schema", **FORM}}}, "text.format"),
        (
            "anthropic",
            {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
            "output_config.format.schema",
        ),
        ("ollama", {"format": BAD}, "format"),
        (
            "gemini",
            {"generationConfig": {"responseMimeType": "application/json", "responseSchema": BAD}},
            "generation_config.response_schema",
        ),
        ("completions", {"structured_outputs": {"json": BAD}}, "structured_outputs"),
        ("tgi", {"parameters": {"grammar": {"type": "json", "value": BAD}}}, "parameters.grammar"),
        ("chat", {"tools": TOOLS}, "tools[0].function.parameters"),
        ("responses", {"tools": [{"type": "function", **FUNCTION}]}, "tools[0].parameters"),
        ("anthropic", {"tools": [{"name": "f", "input_schema": BAD}]}, "tools[0].input_schema"),
        ("ollama", {"tools": TOOLS}, "tools[0].function.parameters"),
        ("gemini", {"tools": [{"functionDeclarations": [FUNCTION]}]}, "function_declarations[0].parameters"),
    ],
)
def test_the_error_of_a_schema_names_the_place_in_it(url, dialect, fields, place):
    path, body = ERRORS[dialect]
    answer = httpx2.post(url + path, json={**body, **fields}, timeout=60)
    assert answer.status_code == (422 if dialect == "tgi" else 400)
    assert json.dumps(f"{place}{REASON}")[1:-1] in answer.text
    if dialect in ("chat", "responses", "completions"):
        assert answer.json()["error"]["param"] == place
