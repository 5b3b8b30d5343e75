"""Prompts of random words and from files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer, models, pre_tokenizers

from genserve.bench.datasets import (
    BenchPrompt,
    RandomLengths,
    local_counter,
    random_dataset,
    random_prompts,
    read_dataset,
    server_counter,
)
from genserve.errors import InvalidRequest, Unreachable
from tests.bench.mock_server import MockServer
from tests.support.live_server import LiveServer


def take(count: int, *, seed: int = 1, counter=None, **lengths) -> list[BenchPrompt]:
    lengths = {"input_len": 12, "output_len": 20} | lengths
    return list(itertools.islice(random_dataset(RandomLengths(**lengths), seed=seed, counter=counter), count))


def test_random_prompts_differ_among_each_other_and_by_seed():
    prompts = random_prompts(5, words=12, seed=1) + random_prompts(5, words=12, seed=2)
    assert len(set(prompts)) == 10
    assert all(len(prompt.split()) == 12 for prompt in prompts)
    assert random_prompts(5, words=12, seed=1) == prompts[:5]


def test_every_random_prompt_begins_with_the_shared_words():
    prompts = [prompt.split() for prompt in random_prompts(5, words=20, shared_words=8, seed=1)]
    assert len({tuple(words[:8]) for words in prompts}) == 1
    assert len({tuple(words[8:]) for words in prompts}) == 5


def test_random_lengths_are_within_their_range():
    prompts = take(200, input_len=20, output_len=10, range_ratio=0.5)
    assert {len(prompt.text.split()) for prompt in prompts} == set(range(10, 31))
    assert {prompt.max_tokens for prompt in prompts} == set(range(5, 16))


@pytest.fixture(params=["server", "file", "folder"])
def counter(request, mock: MockServer, tmp_path: Path):
    """Counts words that it knows as one token; the mock counts all as one."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "year": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if request.param != "server":
        yield local_counter(tmp_path if request.param == "folder" else tmp_path / "tokenizer.json")
        return
    with httpx2.Client(base_url=mock.url) as http:
        yield server_counter(http, model="good")


def test_random_prompts_have_exactly_the_tokens_that_are_counted(counter):
    prompts = take(4, counter=counter, prefix_len=5)
    assert {counter(prompt.text) for prompt in prompts} == {12}
    assert len({tuple(prompt.text.split()[:5]) for prompt in prompts}) == 1


@pytest.mark.parametrize("input_len", [1, 3, 50])
def test_words_of_several_tokens_fill_the_length_as_far_as_they_fit(input_len: int):
    for prompt in take(20, input_len=input_len, counter=len):
        words = prompt.text.split()
        assert len(words) == 1 or input_len - 3 < sum(map(len, words)) <= input_len


def test_the_servers_tokenizer_counts_without_special_tokens(tiny_server: LiveServer, tiny_checkpoint: Path):
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    with httpx2.Client(base_url=tiny_server.url) as http:
        counter = server_counter(http, model="tiny")
        assert counter is not None
        text = "a name of cities"
        assert counter(text) == len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("form", ["llama.cpp", "tgi", "none"])
def test_tokenizers_of_other_servers(form: str):
    async def tokenize(request: Request) -> Response:
        body = await request.json()
        if form == "llama.cpp":
            return JSONResponse({"tokens": [*range(len(body.get("content", "").split()))]})
        if form == "tgi" and "inputs" in body:
            return JSONResponse([{"id": 1, "text": word} for word in body["inputs"].split()])
        return JSONResponse({"error": "unknown"}, status_code=404)

    route = Route("/tokenize", tokenize, methods=["POST"])
    with MockServer(more=[route]) as server, httpx2.Client(base_url=server.url) as http:
        counter = server_counter(http, model="good")
        assert counter is None if form == "none" else counter("a b c d") == 4


def test_a_server_that_no_longer_counts_is_an_error_with_a_remedy():
    replies = iter([200, 429])

    async def tokenize(_request: Request) -> Response:
        return JSONResponse({"count": 3}, status_code=next(replies))

    route = Route("/tokenize", tokenize, methods=["POST"])
    with MockServer(more=[route]) as server, httpx2.Client(base_url=server.url) as http:
        counter = server_counter(http, model="good")
        assert counter is not None
        with pytest.raises(Unreachable, match="429") as caught:
            counter("a b")
    assert "--tokenizer" in caught.value.remedy


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_file_that_is_no_tokenizer_is_rejected(tmp_path: Path, content: str | None):
    if content:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        local_counter(tmp_path)


def read(path: Path, content: str, **options) -> list[BenchPrompt]:
    path.write_text(content)
    return read_dataset(path, **{"output_len": None} | options)


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path):
    assert read(tmp_path / "prompts.txt", "one\n\ntwo {\n") == [
        BenchPrompt(text="one", max_tokens=128),
        BenchPrompt(text="two {", max_tokens=128),
    ]


def test_json_lines(tmp_path: Path):
    messages = [{"role": "user", "content": "hi"}]
    inputs = [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]
    lines = [
        "a prompt",
        {"prompt": "vLLM's", "output_tokens": 7},
        {"messages": messages, "max_tokens": 8, "top_k": 5},
        {"custom_id": "1", "method": "POST", "body": {"model": "m", "messages": messages, "temperature": 1}},
        {"inputs": "TGI's"},
        {"inputs": inputs},
    ]
    prompts = read(tmp_path / "prompts.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    assert prompts == [
        BenchPrompt(text="a prompt", max_tokens=128),
        BenchPrompt(text="vLLM's", max_tokens=7),
        BenchPrompt(text="", max_tokens=8, messages=messages, fields={"top_k": 5}),
        BenchPrompt(text="", max_tokens=128, messages=messages, fields={"temperature": 1}),
        BenchPrompt(text="TGI's", max_tokens=128),
        BenchPrompt(text="", max_tokens=128, fields={"inputs": inputs}),
    ]
    assert {prompt.max_tokens for prompt in read_dataset(tmp_path / "prompts.jsonl", output_len=3)} == {3}


def test_sharegpt_conversations_have_the_length_of_their_answer(tmp_path: Path):
    turns = ["twelve words " * 6, "and an answer of sixteen letters.", "more"]
    too_short, too_long = ["hi", turns[1]], ["w " * 9000, turns[1]]
    conversations: list[object] = [
        {"id": "1", "conversations": [{"from": "human", "value": value} for value in values]}
        for values in (turns, turns[:1], too_short, too_long)
    ]
    conversations += [{"id": "broken", "conversations": [{}, {}]}, "text"]
    path = tmp_path / "sharegpt.json"
    assert read(path, json.dumps(conversations)) == [BenchPrompt(text=turns[0], max_tokens=9)]

    def num_words(text: str) -> int:
        return len(text.split())

    assert [prompt.max_tokens for prompt in read_dataset(path, output_len=None, counter=num_words)] == [6]
    assert [prompt.max_tokens for prompt in read_dataset(path, output_len=2, counter=num_words)] == [2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "\n", "has no prompt"),
        ("a.jsonl", '"fine"\n{"prompt": "x"', r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", '{"text": "x"}', r"a\.jsonl:1 has no prompt"),
        ("a.jsonl", '{"prompt": 3}', "wrong type"),
        ("a.jsonl", '{"prompt": "x", "max_tokens": "many"}', "wrong type"),
        ("a.json", '{"conversations": []}', "not a list of conversations"),
        ("a.json", "[]", "has no prompt"),
    ],
)
def test_a_file_of_another_format_is_rejected(tmp_path: Path, name: str, content: str, message: str):
    with pytest.raises(InvalidRequest, match=message):
        read(tmp_path / name, content)


def test_a_missing_file_is_rejected(tmp_path: Path):
    with pytest.raises(InvalidRequest, match=r"missing\.txt"):
        read_dataset(tmp_path / "missing.txt", output_len=None)
