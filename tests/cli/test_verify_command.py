from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from genserve.completion import Completion
from genserve.engine.receipt import receipt_sha256
from genserve.errors import InvalidRequest, ModelFailed
from genserve.llm import LLM
from genserve.textmodel.receipts import first_difference, repeated_request
from tests.support.command_line import Ended, invoke
from tests.support.thinking_model import copy_with_tags

DRAWN = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True, "return_receipt": True}
PARAMETERS = {"type": "object", "properties": {"b": {"enum": ["x"]}, "a": {"type": "boolean"}}}
TOOLS = [{"type": "function", "function": {"name": "shelf", "parameters": PARAMETERS}}]
MODEL = """
class No:
    def __init__(self, context, *, ids: list[int]):
        self.ids = ids

    def __call__(self, token_ids, logits):
        logits[self.ids] = float("-inf")

class TritonPythonModel:
    logits_processors = {"no": No}

    async def decode(self, sequence):
        while not sequence.finished:
            if sequence.num_new_tokens % 2:
                sequence.append(int((await sequence.logits()).argmin()))
            else:
                sequence.append(await sequence.sample())
"""


@pytest.fixture(scope="module")
def llm(tiny_repository: Path) -> Iterator[LLM]:
    with LLM("tiny", model_repository=tiny_repository) as llm:
        yield llm


@pytest.fixture(scope="module")
def receipt(llm: LLM) -> dict[str, Any]:
    return receipt_of(llm.chat("Where is Ulysses?", **DRAWN))


@pytest.fixture
def repository(tiny_repository, tmp_path) -> Path:
    return shutil.copytree(tiny_repository, tmp_path / "repository")


def receipt_of(completion: Completion) -> dict[str, Any]:
    """The receipt as a client reads it, whose JSON library writes 1.0 as 1."""
    read: dict[str, Any] = json.loads(
        json.dumps(completion.usage.receipt), parse_float=lambda text: float(text.removesuffix(".0"))
    )
    assert tuple(read["token_ids"]) == completion.token_ids
    return read


def changed(receipt: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A receipt with other fields by somebody who knows how to write its digest."""
    other = receipt | fields
    return other | {"sha256": receipt_sha256(other)}


def verify(receipt: Any, repository: Path, *, env: dict[str, str] | None = None) -> Ended:
    words = ["verify", "-", "--model-repository", str(repository)]
    return invoke(words, stdin=json.dumps(receipt), env=env)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "repetition_penalty": 1.5, "bad_words": ["a", "the"]},
        {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "xtc_probability": 0.5, "logit_bias": {7: 2.5}},
        {"mirostat_mode": 2, "dry_multiplier": 0.8, "logprobs": True, "stream_interval": 3},
        {"samplers": ["top_k", "temperature"], "top_k": 7, "seed": 2**64 - 1, "no_repeat_ngram_size": 1},
        {"stop": ["e"], "min_tokens": 3, "max_tokens": None, "include_stop_str_in_output": True},
        {"structured_outputs": {"regex": "[a-z]{4,9}"}, "ignore_eos": False},
        {"structured_outputs": {"json": PARAMETERS}, "ignore_eos": False, "max_tokens": None},
        {"tools": TOOLS, "tool_choice": "required", "ignore_eos": False, "truncate_prompt_tokens": -1},
    ],
)
def test_an_answer_is_repeated_by_its_receipt(llm, options):
    receipt = receipt_of(llm.chat("Where is it?", **{**DRAWN, **options}))
    assert receipt["sha256"] == receipt_sha256(receipt)
    assert llm._model.repeat(repeated_request(receipt)) == receipt


def test_loops_plugins_and_budgets_of_reasoning_are_repeated(tiny_repository, tmp_path):
    repository = copy_with_tags(tiny_repository, tmp_path / "repository")
    (repository / "tiny_decoder" / "1" / "model.py").write_text(MODEL)
    options = {**DRAWN, "logits_processors": [{"name": "no", "args": {"ids": [7, 8]}}]}
    with LLM("tiny", model_repository=repository) as llm:
        receipts = [
            receipt_of(llm.generate("<think>", **options, thinking_token_budget=3)),
            receipt_of(llm.chat("Where is it?", **options)),
        ]
        assert [receipt["begins_reasoning"] for receipt in receipts] == [True, False]
        for receipt in receipts:
            assert llm._model.repeat(repeated_request(receipt)) == receipt
    assert verify(receipts[0], repository).stdout == "equal: 12 tokens and their logits\n"


def test_the_answers_of_one_batch_are_repeated_alone(llm):
    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(lambda word: llm.generate(f"{word} " * 20, **DRAWN), ("a", "bc", "def", "g"))]
    for receipt in map(receipt_of, answers):
        assert llm._model.repeat(repeated_request(receipt)) == receipt


def test_the_answer_to_a_text_is_repeated_and_has_a_receipt_only_on_request(llm):
    receipt = receipt_of(llm.generate("Once upon a time " * 5, **DRAWN))
    assert llm._model.repeat(repeated_request(receipt)) == receipt
    assert llm.generate("Once", max_tokens=1).usage.receipt is None


@pytest.mark.parametrize("kernels", ["", "portable"])
def test_the_kernels_of_all_instruction_sets_give_equal_answers(receipt, tiny_repository, kernels):
    ended = verify({"id": "answer", "receipt": receipt}, tiny_repository, env={"GENSERVE_KERNELS": kernels})
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "equal: 12 tokens and their logits\n", "")


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        (lambda one: {"token_ids": [*one["token_ids"][:3], 5]}, "token 3 of the answer was 5, and is"),
        (lambda one: {"token_ids": one["token_ids"][:-1]}, "token 11 of the answer was the end, and is"),
        (lambda one: {"prompt_token_ids": one["prompt_token_ids"][1:]}, "token"),
        (lambda one: {"params": one["params"] | {"temperature": 0.9}}, "token"),
        (lambda one: {"params": one["params"] | {"stop": ["never"], "max_tokens": 13}}, "token 12"),
        (lambda one: {"seed": str(int(one["seed"]) ^ 1)}, "token"),
        (lambda one: {"logits_sha256": "0" * 64}, "the tokens are equal, and the logits are not"),
        (lambda one: {"finish_reason": "stop"}, "finish_reason was 'stop', and is 'length'"),
    ],
)
def test_another_answer_is_different(receipt, llm, fields, difference):
    other = changed(receipt, **fields(receipt))
    assert re.search(difference, first_difference(other, llm._model.repeat(repeated_request(other))))


def test_a_difference_is_printed_and_so_are_other_kernels(receipt, tiny_repository):
    made_by = receipt["made_by"] | {"kernels": "f" * 64}
    first, *rest = receipt["token_ids"]
    ended = verify(changed(receipt, token_ids=[first ^ 1, *rest], made_by=made_by), tiny_repository)
    assert ended.exit_code == 1
    assert f"different: token 0 of the answer was {first ^ 1}, and is {first}\n" in ended.stdout
    assert "  kernels: ffffffffffff then, " in ended.stdout


def test_of_an_answer_that_a_second_replica_ended_the_tokens_are_compared(receipt, llm, tiny_repository):
    received = tuple(receipt["token_ids"][:3])
    resumed = llm._model.repeat(replace(repeated_request(receipt), resumed_token_ids=(received,)))
    assert (resumed["token_ids"], resumed["logits_sha256"]) == (receipt["token_ids"], None)
    ended = verify(resumed, tiny_repository)
    assert (ended.exit_code, ended.stdout) == (0, "equal: 12 tokens\n")


def test_each_changed_field_is_found(receipt):
    for name, value in receipt.items():
        other = receipt | {name: "x" if value != "x" else "y"}
        with pytest.raises(InvalidRequest, match="format" if name == "receipt" else "was changed") as raised:
            repeated_request(other)
        assert raised.value.field == ("receipt" if name == "receipt" else "sha256")


@pytest.mark.parametrize(
    ("path", "stage"),
    [
        ("tiny_logits/1/*", "logits"),
        ("tiny_tokenizer/1/tokenizer.json", "tokenizer"),
        ("tiny_tokenizer/1/chat_template.jinja", "chat_template, tokenizer"),
        ("tiny_decoder/1/model.py", "decoder"),
    ],
)
def test_a_changed_byte_of_the_model_is_found(receipt, repository, path, stage):
    file = max(repository.glob(path), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    if stage == "logits":
        data[len(data) // 2] ^= 1
    else:
        data += b"\n"
    if stage.endswith("chat_template"):
        data = bytearray(data.replace(b"user", b"User"))
    file.write_bytes(data)
    ended = verify(receipt, repository)
    assert ended.exit_code == 2
    assert f"of another model than 'tiny' here: of {stage}" in ended.error


def test_a_receipt_without_digests_is_of_no_model(receipt, tiny_repository):
    ended = verify(changed(receipt, digests={}), tiny_repository)
    assert ended.exit_code == 2
    assert "of chat_template, decoder, logits, tokenizer remedy" in ended.error


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "standard input is not JSON"),
        ('{"choices": []}', "has 0 receipts, not one"),
        ('{"receipt": 2}', "the format of the receipt is 2; this genserve reads 1"),
        (json.dumps(changed({"receipt": 1, "is_repeatable": True})), "the receipt is not complete"),
        (json.dumps(changed({"receipt": 1, "is_repeatable": False})), "a call has ended its reasoning"),
    ],
)
def test_what_is_no_receipt_cannot_be_verified(tiny_repository, text, problem):
    ended = invoke(["verify", "-", "--model-repository", str(tiny_repository)], stdin=text)
    assert ended.exit_code == 2
    assert problem in ended.error


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": [1, 10**6]},
        {"prompt_token_ids": [1, -1]},
        {"prompt_token_ids": [1] * 257},
        {"seed": "-1"},
        {"chat": {}},
        {"params": []},
        {"params": {"logit_bias": {"1000000": 1}}},
        {"token_ids": None},
        {"made_by": "me"},
    ],
)
def test_a_receipt_with_other_values_harms_nothing(receipt, llm, fields):
    with pytest.raises(InvalidRequest) as raised:
        llm._model.repeat(repeated_request(changed(receipt, **fields)))
    assert raised.value.field


def test_a_receipt_does_not_depend_on_what_python_compiles(receipt, repository):
    with LLM("tiny", model_repository=repository) as llm:
        compiled = repository / "tiny_decoder" / "1" / "__pycache__" / "helper.pyc"
        compiled.parent.mkdir(exist_ok=True)
        compiled.touch()        # as when `decode` imports a module beside its model.py
        assert llm.generate("Once", **DRAWN).usage.receipt["digests"] == receipt["digests"]


def test_no_receipt_names_files_that_have_changed_since_the_load(repository):
    with LLM("tiny", model_repository=repository) as llm:
        os.utime(repository / "tiny_tokenizer" / "1" / "tokenizer.json", ns=(0, 0))
        with pytest.raises(ModelFailed, match="have changed since it was loaded"):
            llm.generate("Once", **DRAWN)
        assert llm.generate("Once", max_tokens=1).text


@pytest.mark.parametrize(
    "options", [{"max_time_ms": 100}, {"best_of": 2}, {"use_beam_search": True, "temperature": 0.0}]
)
def test_what_cannot_be_repeated_is_rejected(llm, options):
    with pytest.raises(InvalidRequest, match=next(iter(options))) as caught:
        llm.complete("Once", **{**DRAWN, "ignore_eos": False, **options})
    assert caught.value.field == "return_receipt"
