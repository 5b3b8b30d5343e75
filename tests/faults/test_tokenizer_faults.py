"""Broken tokenizers: loading one fails with a reason, or its requests do; the server and others live on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.broken_repository import BrokenRepository, Write, serving_beside_good, write_model

_CONFIG = """backend: "tokenizer"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] } ]
"""
# Takes twice as many steps for each further letter.
_SLOW_REGEX = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
_SLOW_TEXT = "a" * 1000 + "b"
_UNKNOWN_TOKEN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


def _file(*, vocab: dict[str, int] | None = None, merges: tuple[str, ...] = (), **parts: Any) -> bytes:
    model = {"type": "BPE", "vocab": vocab or {"a": 0, "b": 1}, "merges": merges}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts}).encode()


def _tokenizer(content: bytes | None, *, config: bytes | None = b"{}") -> Write:
    def write(folder: Path) -> None:
        version = write_model(folder, content, config=_CONFIG, file="tokenizer.json")
        if config is not None:
            (version / "tokenizer_config.json").write_bytes(config)

    return write


def _huge(folder: Path) -> None:
    _tokenizer(b"{")(folder)
    os.truncate(folder / "1" / "tokenizer.json", 500_000_000)


def _template_is_a_fifo(folder: Path) -> None:
    _tokenizer(_file())(folder)
    os.mkfifo(folder / "1" / "chat_template.jinja")


# The way to break a tokenizer, and words of the reason.
BROKEN: dict[str, tuple[Write, str]] = {
    "missing": (_tokenizer(None), "tokenizer.json is missing"),
    "empty": (_tokenizer(b""), "tokenizer.json is empty"),
    "not-json": (_tokenizer(b"hello"), "expected value"),
    "null": (_tokenizer(b"null"), "invalid type: null"),
    "10000-lists-deep": (_tokenizer(b'{"version": "1.0", "model": ' + b"[" * 10_000), "recursion limit"),
    "500-megabytes": (_huge, "longer than 268435456 bytes"),
    "id-minus-1": (_tokenizer(_file(vocab={"a": 0, "b": -1})), "invalid value: integer `-1`"),
    "id-2-32": (_tokenizer(_file(vocab={"a": 0, "b": 2**32})), "invalid value: integer `4294967296`"),
    "merge-of-unknown-tokens": (_tokenizer(_file(merges=("a c",))), "out of vocabulary"),
    "invalid-regex": (
        _tokenizer(_file(pre_tokenizer=_SLOW_REGEX | {"pattern": {"Regex": "(a"}})),
        "unmatched parenthesis",
    ),
    "adds-an-unknown-token": (_tokenizer(_file(post_processor=_UNKNOWN_TOKEN)), "no entry found"),
    "config-missing": (_tokenizer(_file(), config=None), "tokenizer_config.json is missing"),
    "config-100000-lists-deep": (_tokenizer(_file(), config=b"[" * 100_000), "recursion"),
    "eos-token-unknown": (_tokenizer(_file(), config=b'{"eos_token": "</s>"}'), "not in the vocabulary"),
    "chat-template-is-a-fifo": (_template_is_a_fifo, "chat_template.jinja is a FIFO"),
}


@pytest.fixture(scope="module")
def repository(
    tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokenRepository]:
    root = tmp_path_factory.mktemp("tokenizers") / "models"
    shutil.copytree(tiny_repository, root)
    file = root / "tiny_tokenizer" / "1" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    parts = [_SLOW_REGEX, tokenizer["pre_tokenizer"]]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    file.write_text(json.dumps(tokenizer))
    models = {name: write for name, (write, _) in BROKEN.items()}
    models["slow-regex"] = _tokenizer(_file(pre_tokenizer=_SLOW_REGEX))
    models["two-tokens-of-one-id"] = _tokenizer(_file(vocab={"a": 0, "b": 0}))
    with serving_beside_good(root, models) as served:
        yield served


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_listed_with_its_reason_and_harms_no_other(
    repository: BrokenRepository, name: str
) -> None:
    repository.check_broken(name, BROKEN[name][1])
    repository.check_good()


def _encode(repository: BrokenRepository, model: str, text: str) -> httpx.Response:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [text]}
    return repository.http.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})


def test_a_text_that_a_regex_cannot_match_fails_alone(repository: BrokenRepository) -> None:
    for _ in range(2):
        answer = _encode(repository, "slow-regex", _SLOW_TEXT)
        assert (answer.status_code, "tokenizer.json" in answer.json()["remedy"]) == (500, True)
        assert _encode(repository, "slow-regex", "ab").json()["outputs"][0]["data"] == [0, 1]
        repository.check_good()


def test_a_prompt_that_a_regex_cannot_match_fails_alone(repository: BrokenRepository) -> None:
    for stream in (False, True):
        body = {"model": "tiny", "prompt": _SLOW_TEXT, "max_tokens": 2, "stream": stream}
        answer = repository.http.post("/v1/completions", json=body)
        assert '"model_failed"' in answer.text
        assert "tokenizer.json" in answer.text      # which is in the remedy
        body = {"model": "tiny", "prompt": "b", "max_tokens": 2}
        assert repository.http.post("/v1/completions", json=body).is_success


def test_tokens_that_share_an_id_are_served(repository: BrokenRepository) -> None:
    answer = _encode(repository, "two-tokens-of-one-id", "ab")
    assert answer.json()["outputs"][0]["data"] == [0, 0]
