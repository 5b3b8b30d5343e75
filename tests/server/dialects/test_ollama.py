"""Ollama's dialect over a model that writes given answers."""

from __future__ import annotations

import json
import re

import httpx2
import pytest

from tests.support.live_server import LiveServer
from tests.support.scripted_model import FAILS, scripted_repository

SCRIPTS = {"#1": "ok: 12", "#2": "<think>\n?!\n</think>\n\n12", "#3": "12" + FAILS}
SCRIPTS["#5"] = '12<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": NUMBER}}]
TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}"
    "{% if m.name %} {{ m.name }}{% endif %}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant: {% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}"
)
COUNTS = (
    '"total_duration":0,"load_duration":0,"prompt_eval_count":{},"prompt_eval_duration":0,"eval_count":{},'
    '"eval_duration":0'
)


@pytest.fixture(scope="module")
def scripted(tiny_repository, tmp_path_factory):
    root = tmp_path_factory.mktemp("ollama") / "repository"
    with LiveServer(scripted_repository(tiny_repository, root, SCRIPTS, template=TEMPLATE)) as server:
        yield server


@pytest.fixture
def http(scripted):
    with httpx2.Client(base_url=scripted.url, timeout=60) as client:
        yield client


def chat(http, content="#1", **fields):
    messages = [{"role": "user", "content": content}]
    return http.post("/api/chat", json={"model": "tiny", "messages": messages, **fields})


def generate(http, prompt="#1", **fields):
    return http.post("/api/generate", json={"model": "tiny:latest", "prompt": prompt, **fields})


def timeless(response):
    """The text of an answer with the same times in each run."""
    assert response.status_code == 200, response.text
    dated = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", "NOW", response.text)
    return re.sub(r'_duration":\d+', '_duration":0', dated)


def line(message, *, model="tiny", ending='"done":false'):
    return f'{{"model":"{model}","created_at":"NOW",{message},{ending}}}\n'


def part(content, **more):
    fields = "".join(f',"{name}":"{value}"' for name, value in more.items())
    return f'"message":{{"role":"assistant","content":"{content}"{fields}}}'


def done(reason, num_prompt_tokens, num_tokens):
    return f'"done":true,"done_reason":"{reason}",{COUNTS.format(num_prompt_tokens, num_tokens)}'


def test_a_streamed_chat_byte_for_byte(http):
    response = chat(http)
    assert response.headers["content-type"] == "application/x-ndjson"
    expected = "".join(line(part(text)) for text in "ok: 12")
    assert timeless(response) == expected + line(part(""), ending=done("stop", 19, 6))


def test_a_streamed_text_byte_for_byte(http):
    response = generate(http, raw=True, options={"num_predict": 3})
    expected = "".join(line(f'"response":"{text}"', model="tiny:latest") for text in "ok:")
    ending = line('"response":""', model="tiny:latest", ending=done("length", 2, 3))
    assert timeless(response) == expected + ending


def test_a_streamed_thought_byte_for_byte(http):
    expected = "".join(line(part("", thinking=text)) for text in "?!") + line(part("1")) + line(part("2"))
    assert timeless(chat(http, "#2", think=True)) == expected + line(part(""), ending=done("stop", 19, 10))


def test_a_streamed_call_byte_for_byte(http):
    written = timeless(chat(http, "#5", tools=TOOLS))
    [call] = re.findall("call_[0-9a-f]{24}", written)
    function = '{"index":0,"name":"add","arguments":{"a":12}}'
    called = part("")[:-1] + f',"tool_calls":[{{"id":"{call}","function":{function}}}]}}'
    expected = line(part("1")) + line(part("2")) + line(called)
    assert written == expected + line(part(""), ending=done("stop", 29, 62))
    [whole] = chat(http, "#5", tools=TOOLS, stream=False).json()["message"]["tool_calls"]
    assert whole["function"] == json.loads(function)


def test_a_stop_ends_the_text(http):
    answer = chat(http, stream=False, options={"stop": [" "]}).json()
    assert (answer["message"]["content"], answer["done_reason"]) == ("ok:", "stop")


def test_an_error_in_the_middle_of_a_stream_is_a_line(http):
    lines = chat(http, "#3").text.splitlines()
    assert [json.loads(text)["message"]["content"] for text in lines[:-1]] == ["1", "2"]
    assert json.loads(lines[-1]).keys() == {"error"}
    assert "ValueError: the script says so" in lines[-1]


def test_a_whole_answer(http):
    response = chat(http, "#2", stream=False)
    assert response.headers["content-type"] == "application/json"
    written = line(part("12", thinking="?!"), ending=done("stop", 19, 10))
    assert timeless(response) == written.rstrip("\n")
    times = response.json()
    assert times["total_duration"] >= times["prompt_eval_duration"] > 0
    answer = generate(http, "#2", stream=False).json()
    assert (answer["response"], answer["thinking"]) == ("12", "?!")


def test_an_empty_request_only_loads_the_model(http):
    assert timeless(generate(http, "")) == (
        '{"model":"tiny:latest","created_at":"NOW","response":"","done":true,"done_reason":"load"}'
    )
    answer = http.post("/api/chat", json={"model": "tiny", "keep_alive": 0}).json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_the_options_of_an_empty_request_are_validated(http, path):
    rejected = http.post(path, json={"model": "tiny", "options": {"mirostat": -1}})
    assert rejected.status_code == 400
    assert rejected.json()["error"].startswith("options.mirostat ")


def test_logprobs_are_those_of_the_tokens(tiny_server):
    ask = {"logprobs": True, "top_logprobs": 2, "options": {"temperature": 0, "num_predict": 4}}
    with httpx2.Client(base_url=tiny_server.url, timeout=60) as http:
        answer = generate(http, stream=False, **ask).json()
        lines = [json.loads(text) for text in generate(http, **ask).text.splitlines()]
    assert "".join(token["token"] for token in answer["logprobs"]) == answer["response"]
    for token in answer["logprobs"]:
        assert token.items() >= token["top_logprobs"][0].items()
        assert len(token["top_logprobs"]) == 2
        assert bytes(token["bytes"]).decode() == token["token"]
    assert [token for one in lines for token in one.get("logprobs", [])] == answer["logprobs"]


def test_logprobs_are_those_of_the_text_before_a_stop(http):
    ask = {"logprobs": True, "options": {"stop": [": 1"]}}
    answer = chat(http, stream=False, **ask).json()
    assert answer["message"]["content"] == "ok"
    assert [token["token"] for token in answer["logprobs"]] == ["o", "k"]
    lines = [json.loads(text) for text in chat(http, **ask).text.splitlines()]
    assert [token for one in lines for token in one.get("logprobs", [])] == answer["logprobs"]


def prompt(http, scripted, path="/api/chat", **fields):
    """The prompt that the template makes of a request."""
    encoded = []
    inputs = scripted.model.inputs
    encode = inputs.encode
    inputs.encode = lambda chat, **limits: encoded.append(encode(chat, **limits)) or encoded[-1]
    try:
        http.post(path, json={"stream": False, **fields})
    finally:
        del inputs.encode
    return scripted.model.tokenizer.decode(encoded[0])


def test_calls_and_results_get_ids(http, scripted):
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("add", "sub")]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "thinking": "h", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_name": "sub"},
        {"role": "tool", "content": "3"},
    ]
    assert prompt(http, scripted, messages=messages) == (
        '[user: a][assistant: (h)call00000add{"a": 1}call00001sub{"a": 1}]'
        "[tool sub call00001: 2][tool add call00000: 3][assistant: "
    )


def test_a_placeholder_takes_the_place_of_an_image_in_a_result(http, scripted):
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
        {"role": "tool", "content": "2", "tool_name": "add", "images": ["aGk=", "aGk="]},
    ]
    left_out = "[image left out: this model reads text only]"
    shown = prompt(http, scripted, messages=messages)
    assert shown.startswith("[system: s][user: a]")
    assert f": 2\n{left_out}\n{left_out}]" in shown


def test_a_prompt_is_a_turn_of_the_user_unless_it_is_raw(http, scripted):
    ask = {"path": "/api/generate", "prompt": "a"}
    assert prompt(http, scripted, **ask, system="b") == "[system: b][user: a][assistant: "
    assert prompt(http, scripted, **ask, raw=True) == "a"
    assert prompt(http, scripted, **ask, think=False) == "[user: a][assistant: -"
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert prompt(http, scripted, messages=begun) == "[user: a][assistant: b"


def test_an_answer_has_the_required_form(tiny_server):
    with httpx2.Client(base_url=tiny_server.url, timeout=60) as http:
        answer = chat(http, stream=False, format={"enum": ["12"]}).json()
        assert answer["message"]["content"] == '"12"'
        begun = chat(http, stream=False, format="json", options={"num_predict": 2}).json()
        assert begun["message"]["content"].startswith("{")


def params(scripted, **options):
    """The sampling parameters of a request with these options."""
    from genserve.server.dialects.ollama.body import OllamaGenerateBody

    body = OllamaGenerateBody.model_validate({"prompt": "a", "options": options})
    read = body.params()
    return {name: getattr(read, name) for name in read.changed}


def test_options_become_sampling_parameters(scripted):
    assert params(scripted) == {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
    assert params(scripted, temperature=0) == {}
    assert params(scripted, temperature=0, num_predict=-1, seed=-1, num_ctx=9, min_p=0.1) == {"min_p": 0.1}
    assert params(scripted, temperature=0, repeat_penalty=1.5) == {
        "repetition_penalty": 1.5, "penalty_window": 64
    }
    floats = {"num_predict": 10.0, "top_k": 3.0, "seed": 42.0, "repeat_last_n": 64.0, "min_tokens": 2.0}
    assert params(scripted, temperature=1, top_p=1, repeat_penalty=1.5, **floats) == {
        "max_tokens": 10, "top_k": 3, "seed": 42, "penalty_window": 64, "min_tokens": 2,
        "repetition_penalty": 1.5, "temperature": 1.0,
    }
    penalty = {"repeat_penalty": 1.5, "temperature": 0}
    assert params(scripted, **penalty, repeat_last_n=-1) == {"repetition_penalty": 1.5}
    assert params(scripted, **penalty, repeat_last_n=0) == {}
    assert params(scripted, mirostat=2, mirostat_tau=3.0, seed=7) == {
        "temperature": 0.8, "mirostat_mode": 2, "mirostat_tau": 3.0, "seed": 7
    }


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("chat", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
        ("chat", {"options": {"temperature": -1}}, "options.temperature"),
        ("chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ("chat", {"options": {"top_k": "many"}}, "options.top_k"),
        ("chat", {"options": {"num_predict": 10.5}}, "options.num_predict"),
        ("chat", {"format": "yaml"}, "format"),
        ("chat", {"tools": [{"type": "function"}]}, "tools[0]"),
        ("chat", {"top_logprobs": 21}, "top_logprobs"),
        ("generate", {"suffix": "a"}, "suffix"),
        ("generate", {"template": "{{ .Prompt }}"}, "template"),
        ("generate", {"context": [1, 2]}, "/api/chat"),
        ("generate", {"raw": True, "system": "a"}, "system"),
        ("generate", {"images": ["aGk="]}, "images"),
    ],
)
def test_invalid_fields_are_rejected_in_ollamas_form(http, path, change, message):
    for stream in (True, False):
        response = (chat if path == "chat" else generate)(http, stream=stream, **change)
        assert response.status_code == 400, response.text
        assert response.json().keys() == {"error"}
        assert message in response.json()["error"]


def test_a_model_without_thinking_rejects_think(tiny_server):
    response = httpx2.post(f"{tiny_server.url}/api/chat", json={"model": "tiny", "think": True})
    assert response.status_code == 400
    assert response.json() == {"error": '"tiny" does not support thinking'}


def test_fields_without_effect_are_named(http):
    response = chat(http, stream=False, keep_alive="5m", options={"num_ctx": 2048, "mirostat_tau": 3.0})
    assert response.headers["x-genserve-ignored"] == "keep_alive,options.num_ctx,options.mirostat_tau"


def test_models_are_listed_and_described(http):
    [listed] = http.get("/api/tags").json()["models"]
    [running] = http.get("/api/ps").json()["models"]
    assert listed["name"] == listed["model"] == running["name"] == "tiny:latest"
    assert listed["size"] > 100_000
    assert re.fullmatch("[0-9a-f]{64}", listed["digest"])
    assert listed["details"] == running["details"]
    assert running["context_length"] == 256
    for name in ("tiny", "tiny:latest"):
        shown = http.post("/api/show", json={"model": name}).json()
        assert shown["template"] == TEMPLATE
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        family = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{family}.context_length"] == 256
    assert re.fullmatch(r"\d+\.\d+\.\d+", http.get("/api/version").json()["version"])


def test_a_missing_model_is_not_found(http):
    for path in ("chat", "generate", "show"):
        response = http.post(f"/api/{path}", json={"model": "no", "prompt": "a"})
        assert response.status_code == 404
        assert response.json()["error"].startswith("model 'no' not found")


def test_models_cannot_be_changed_and_a_pull_confirms_those_that_are_there(http):
    assert http.post("/api/pull", json={"model": "tiny"}).text == '{"status": "success"}\n'
    assert http.post("/api/pull", json={"model": "tiny", "stream": False}).json() == {"status": "success"}
    missing = http.post("/api/pull", json={"model": "no"})
    assert missing.status_code == 404
    assert "genserve pull" in missing.json()["error"]
    calls = [("POST", "push"), ("POST", "create"), ("POST", "copy"), ("DELETE", "delete")]
    calls += [("POST", "blobs/sha256:1")]
    for method, path in calls:
        body = {"model": "no", "source": "tiny", "destination": "no"}
        response = http.request(method, f"/api/{path}", json=body)
        assert response.status_code == 501
        assert response.json().keys() == {"error"}
