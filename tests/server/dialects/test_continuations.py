"""The texts of answers of a SentencePiece model: their spaces, bytes and stops, in each dialect.

The model has the tokenizer of Llama 2, and answers everything with ` a`, a newline, ` b` and a euro sign, of
which the newline and the sign are byte tokens; but `ab ab` with a special token among the others.
"""

from __future__ import annotations

import json
import shutil

import httpx2
import pytest
from tokenizers import processors

from genserve.llm import LLM
from tests.support.live_server import LiveServer
from tests.text.vocabularies import sentencepiece_bpe

ANSWER = " a\n b\u20ac"
EURO = ["<0xE2>", "<0x82>", "<0xAC>"]
TOKENS = ["\u2581a", "<0x0A>", "\u2581b", *EURO]
TEXTS = [" a", "\n", " b", "", "", "\u20ac"]
WITH_SPECIAL = ["\u2581a", "<0x0A>", "<s>", "\u2581b"]
DECODER = """
class TritonPythonModel:
    async def decode(self, sequence):
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        for token_id in {with_special} if prompt.count({ab}) > 1 else {ids}:
            await sequence.sample()
            sequence.append(token_id)
            if sequence.finished:
                return
        sequence.finish("stop")
"""
USER = {"role": "user", "content": "b"}
CHAT = {"messages": [USER]}
CONTINUED = {"messages": [USER, {"role": "assistant", "content": "ab"}]}


@pytest.fixture(scope="module")
def repository(tiny_repository, tmp_path_factory):
    root = tmp_path_factory.mktemp("sentencepiece") / "repository"
    shutil.copytree(tiny_repository, root)
    folder = root / "tiny_tokenizer" / "1"
    backend = sentencepiece_bpe()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    ids, with_special = ([*map(backend.token_to_id, tokens)] for tokens in (TOKENS, WITH_SPECIAL))
    decoder = DECODER.format(ids=ids, with_special=with_special, ab=backend.token_to_id("\u2581ab"))
    (root / "tiny_decoder" / "1" / "model.py").write_text(decoder)
    return root


@pytest.fixture(scope="module")
def server(repository):
    with LiveServer(repository) as server:
        yield server


@pytest.fixture
def http(server):
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def post(http, path, **body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


def events(response):
    """The objects of a stream, as server-sent events or lines."""
    lines = (line.removeprefix("data:").strip() for line in response.text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/v1/completions", {"prompt": "ab"}, lambda one: one["choices"][0]["text"]),
        ("/generate", {"inputs": "ab"}, lambda one: one["generated_text"]),
        ("/api/generate", {"prompt": "ab", "raw": True, "stream": False}, lambda one: one["response"]),
        ("/v2/models/tiny/generate", {"text_input": "ab"}, lambda one: one["text_output"]),
        (
            "/v1/chat/completions",
            {**CONTINUED, "continue_final_message": True, "add_generation_prompt": False},
            lambda one: one["choices"][0]["message"]["content"],
        ),
        ("/v1/messages", {**CONTINUED, "max_tokens": 9}, lambda one: one["content"][0]["text"]),
        ("/api/chat", {**CONTINUED, "stream": False}, lambda one: one["message"]["content"]),
    ],
)
def test_an_answer_that_continues_a_text_keeps_its_first_space(http, path, body, read):
    assert read(post(http, path, **body).json()) == ANSWER


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/v1/completions", {"prompt": "ab", "stream": True}, lambda one: one["choices"][0]["text"]),
        ("/generate_stream", {"inputs": "ab"}, lambda one: one["token"]["text"]),
        ("/api/generate", {"prompt": "ab", "raw": True}, lambda one: one["response"]),
        (
            "/v2/models/tiny/generate_stream",
            {"text_input": "ab", "stream": True},
            lambda one: one["text_output"],
        ),
        (
            "/v1/chat/completions",
            {**CONTINUED, "continue_final_message": True, "add_generation_prompt": False, "stream": True},
            lambda one: one["choices"][0]["delta"].get("content", ""),
        ),
    ],
)
def test_a_stream_is_the_same_text_character_by_character(http, path, body, read):
    parts = [read(one) for one in events(post(http, path, **body))]
    assert [part for part in parts if part] == [" a", "\n", " b", "\u20ac"]


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/v1/chat/completions", CHAT, lambda one: one["choices"][0]["message"]["content"]),
        ("/v1/responses", {"input": "b"}, lambda one: one["output"][0]["content"][0]["text"]),
        ("/v1/messages", {**CHAT, "max_tokens": 9}, lambda one: one["content"][0]["text"]),
        ("/api/chat", {**CHAT, "stream": False}, lambda one: one["message"]["content"]),
    ],
)
def test_a_message_begins_without_a_space(http, path, body, read):
    assert read(post(http, path, **body).json()) == ANSWER.lstrip()


def test_an_echo_and_several_answers_are_the_decode_of_all_tokens(http, server):
    prompts = ["ab", "b a"]
    ids = [server.model.tokenizer.encode(prompt) for prompt in prompts]
    for asked in (prompts, ids):
        answer = post(http, "/v1/completions", prompt=asked, echo=True, n=2, best_of=3).json()
        assert [choice["text"] for choice in answer["choices"]] == ["ab" + ANSWER] * 2 + ["b a" + ANSWER] * 2
    whole = [*ids[0][1:], *map(server.model.tokenizer.token_id, TOKENS)]
    assert post(http, "/detokenize", tokens=whole).json()["prompt"] == "ab" + ANSWER


def test_the_package_answers_as_the_server(repository):
    with LLM("tiny", model_repository=repository) as llm:
        assert [answer.text for answer in llm.complete("ab", n=2)] == [ANSWER] * 2
        assert llm.chat("b").text == ANSWER.lstrip()


def test_each_token_has_its_own_text_and_bytes(http):
    [choice] = post(http, "/v1/completions", prompt="ab", logprobs=2, echo=True).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["", "ab", *TEXTS]
    assert logprobs["text_offset"] == [0, 0, 2, 4, 5, 7, 7, 7]
    answer = post(http, "/api/generate", prompt="ab", raw=True, stream=False, logprobs=True).json()
    assert [token["token"] for token in answer["logprobs"]] == TEXTS
    bytes_of = [b" a", b"\n", b" b", b"\xe2", b"\x82", b"\xac"]
    assert [bytes(token["bytes"]) for token in answer["logprobs"]] == bytes_of
    body = {"messages": [USER], "logprobs": True}
    [choice] = post(http, "/v1/chat/completions", **body).json()["choices"]
    assert [bytes(token["bytes"]) for token in choice["logprobs"]["content"]] == [b"a", *bytes_of[1:]]
    cut = post(http, "/v1/chat/completions", **body, max_tokens=5).json()["choices"][0]
    assert cut["message"]["content"] == "a\n b\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"
    assert [bytes(token["bytes"]) for token in cut["logprobs"]["content"]] == [b"a", *bytes_of[1:5]]


def test_a_stop_of_one_byte_token_costs_no_further_token(http):
    answer = post(http, "/v1/completions", prompt="ab", stop="\n", return_token_ids=True).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" a", "stop", "\n")
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 2


ASKED = {"messages": [{"role": "user", "content": "ab ab"}]}


@pytest.mark.parametrize(
    ("stop", "text"), [("<s>", "a\n"), ("\n<s>", "a"), ("<s> b", "a\n"), ("<s>b", "a\n b"), ("</s>", "a\n b")]
)
@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/v1/chat/completions", {**ASKED, "stop": 0}, lambda one: one["choices"][0]["message"]["content"]),
        ("/v1/completions", {"prompt": "ab ab", "stop": 0}, lambda one: one["choices"][0]["text"]),
        (
            "/v1/messages",
            {**ASKED, "max_tokens": 9, "stop_sequences": 0},
            lambda one: one["content"][0]["text"],
        ),
        (
            "/api/chat",
            {**ASKED, "stream": False, "options": {"stop": 0}},
            lambda one: one["message"]["content"],
        ),
        ("/generate", {"inputs": "ab ab", "parameters": {"stop": 0}}, lambda one: one["generated_text"]),
        (
            "/v2/models/tiny/generate",
            {"text_input": "ab ab", "stop_words": 0},
            lambda one: one["text_output"],
        ),
    ],
)
def test_a_stop_may_be_or_contain_the_name_of_a_special_token(http, path, body, read, stop, text):
    written = json.loads(json.dumps(body).replace(": 0", f": {json.dumps([stop])}"))
    assert read(post(http, path, **written).json()).lstrip(" ") == text


def test_a_stop_that_is_a_special_token_is_reported_as_the_stop(http):
    body = {"prompt": "ab ab", "stop": "<s>", "return_token_ids": True}
    [choice] = post(http, "/v1/completions", **body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], len(choice["token_ids"])) == ("stop", "<s>", 3)
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    [choice] = post(http, "/v1/completions", **body, **shown).json()["choices"]
    assert choice["text"] == " a\n<s>"


def test_a_prompt_begins_with_the_special_tokens_unless_the_request_says_otherwise(http):
    def prompt_ids(path, body, **more):
        answer = post(http, path, **body, **more, max_tokens=1, return_token_ids=True).json()
        return answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]

    text, chat = {"prompt": "<s>ab"}, {"messages": [{"role": "user", "content": "<s>ab"}]}
    plain = {"messages": [USER]}
    chats = "/v1/chat/completions"
    for path, body in (("/v1/completions", text), (chats, chat), (chats, plain)):
        without = prompt_ids(path, body, add_special_tokens=False)
        assert prompt_ids(path, body, add_special_tokens=True) == [1, *without]
        default = [1, *without] if body is text else without
        assert prompt_ids(path, body) == default
        for options, expected in (({}, default), ({"add_special_tokens": False}, without)):
            assert post(http, "/tokenize", **body, **options).json()["tokens"] == expected
            rendered = post(http, f"{path}/render", **body, **options).json()
            rendered = rendered[0] if isinstance(rendered, list) else rendered
            assert rendered["token_ids"] == expected
    assert prompt_ids("/v1/completions", text, add_special_tokens=False)[0] == 1, "it is in the text"
