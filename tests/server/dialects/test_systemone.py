"""System One: typed questions over sockets, compared with the probabilities that transformers computes."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from transformers import AutoTokenizer

from genserve.client import AsyncClient, Client
from genserve.export import SilentProgress, export_model
from tests.support.live_server import LiveServer
from tests.support.thinking_model import copy_with_tags
from tests.support.tiny_llama import CHAT_TEMPLATE, tiny_llama_checkpoint
from tests.support.transformers_reference import reference_logits, reference_model

STATE = "The parcel came late, and it was opened. I want my money back, please write to me today."
CHOICE = {
    "type": "choice",
    "instructions": "What is it about?",
    "criteria": {"billing": "money and refunds", "delivery": None, "other": {"what": "the rest"}},
}
NOUL = {"type": "noul", "instructions": "Is it urgent?"}
SCORE = {"type": "score", "instructions": "How angry?", "criteria": ["calm", "annoyed", {"level": "angry"}]}
QUESTIONS = {"topic": CHOICE, "urgent": NOUL, "anger": SCORE}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_checkpoint(tmp_path_factory.mktemp("systemone") / "checkpoint", context=1024)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    folder = tmp_path_factory.mktemp("systemone") / "repository"
    export_model(str(checkpoint), repository=folder, name="tiny", precision="fp32", progress=SilentProgress())
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[LiveServer]:
    with LiveServer(repository) as server:
        yield server


def ask(server: LiveServer, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/systemone", json={"state": STATE, "questions": QUESTIONS} | fields)


@pytest.fixture(scope="module")
def reference(checkpoint: Path):
    """Return the probability of each answer of the model to a chat's only turn."""
    model, tokenizer = reference_model(checkpoint), AutoTokenizer.from_pretrained(checkpoint)

    def probabilities(text: str, answers: Sequence[str]) -> list[float]:
        turn = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        found = []
        for answer in answers:
            ids = np.array(tokenizer(prompt + answer, add_special_tokens=False)["input_ids"])
            num_own = len(tokenizer(answer, add_special_tokens=False)["input_ids"])
            logits = reference_logits(model, ids).astype(np.float64)
            logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
            before = range(len(ids) - num_own - 1, len(ids) - 1)
            found.append(math.exp(sum(logprobs[index, ids[index + 1]] for index in before)))
        return found

    return probabilities


def texts() -> dict[str, str]:
    return {
        "topic": f"{STATE}\n\nQuestion: What is it about?\nA: billing - money and refunds\nB: delivery\n"
        'C: other - {"what": "the rest"}\nAnswer with the letter of one option only.',
        "urgent": f"{STATE}\n\nQuestion: Is it urgent?\nAnswer with yes or no only.",
        "anger": f'{STATE}\n\nQuestion: How angry?\n0: calm\n1: annoyed\n2: {{"level": "angry"}}\n'
        "Answer with the number of one level only.",
    }


def test_the_answers_are_the_probabilities_of_the_labels_among_each_other(server, reference):
    reply = ask(server)
    assert reply.status_code == 200, reply.text
    answers = reply.json()["answers"]

    letters = reference(texts()["topic"], "ABC")
    shares = np.array(letters) / sum(letters)
    assert np.allclose([*answers["topic"]["probabilities"].values()], shares, rtol=1e-4)
    names = ["billing", "delivery", "other"]
    assert [*answers["topic"]["probabilities"]] == names
    assert answers["topic"]["choice"] == names[int(shares.argmax())]
    assert answers["topic"]["confidence"] == pytest.approx((shares.max() - 1 / 3) / (2 / 3), rel=1e-3)
    assert reply.json()["diagnostics"]["topic"]["label_mass"] == pytest.approx(sum(letters), rel=1e-4)

    yes, also_yes, no, also_no = reference(texts()["urgent"], ["yes", "Yes", "no", "No"])
    assert answers["urgent"]["noul"] == pytest.approx(
        (yes + also_yes) / (yes + also_yes + no + also_no), rel=1e-4
    )

    levels = np.array(reference(texts()["anger"], "012"))
    levels /= levels.sum()
    anger = answers["anger"]
    assert np.allclose([*anger["probabilities"].values()], levels, rtol=1e-4)
    assert anger["score"] == pytest.approx(levels[1] + 2 * levels[2], rel=1e-4)
    assert anger["legend"] == {"0": "calm", "1": "annoyed", "2": {"level": "angry"}}
    distance = sum(level * abs(index - levels.argmax()) for index, level in enumerate(levels))
    assert anger["confidence"] == pytest.approx(max(0, 1 - distance / (2 / 3)), abs=1e-4)


def test_an_answer_is_the_same_alone_and_beside_others(server):
    together = ask(server).json()["answers"]
    for name, question in QUESTIONS.items():
        assert ask(server, questions={name: question}).json()["answers"][name] == together[name]


def test_the_state_is_read_once(server):
    state = "A story of its own. " * 6  # all questions would fit into one step
    usage = ask(server, state=state).json()["usage"]
    block_size = server.model.logits.block_size
    num_state_tokens = len(server.model.encode(state))
    # Each question but the first continues behind the state's last whole block.
    assert usage["input_tokens_details"]["cached_tokens"] >= 2 * (num_state_tokens - block_size)
    assert usage["input_tokens"] > 3 * num_state_tokens
    assert usage["output_tokens"] == 3


def test_a_choice_of_many_options_has_labels_of_two_letters(server, reference):
    names = [f"option {index}" for index in range(40)]
    question = {"type": "choice", "criteria": dict.fromkeys(names)}
    answer = ask(server, questions={"one": question}).json()["answers"]["one"]
    labels = [chr(65 + index // 26) + chr(65 + index % 26) for index in range(40)]
    lines = "".join(f"{label}: {name}\n" for label, name in zip(labels, names, strict=True))
    text = f"{STATE}\n\n{lines}Answer with the letter of one option only."
    found = reference(text, labels)
    assert np.allclose([*answer["probabilities"].values()], np.array(found) / sum(found), rtol=1e-3)


@pytest.mark.parametrize("instructions", [None, "You sort letters."])
def test_the_instructions_are_the_system_message(server, instructions):
    fields = {} if instructions is None else {"instructions": instructions}
    plain, asked = ask(server).json(), ask(server, **fields).json()
    assert (plain["answers"] == asked["answers"]) is (instructions is None)


@pytest.mark.parametrize("state", [{"subject": "Parcel", "words": ["late", "é"]}, ["late", 3]])
def test_a_state_of_json_is_written_as_json(server, state):
    assert (
        ask(server, state=state).json()["answers"]
        == ask(server, state=json.dumps(state, ensure_ascii=False)).json()["answers"]
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"state": None}, "state"),
        ({"state": 3}, "state"),
        ({"state": "late " * 1000}, "state"),
        ({"questions": {}}, "questions"),
        ({"questions": dict.fromkeys(map(str, range(65)), NOUL)}, "questions"),
        ({"questions": {"a": NOUL | {"type": "box"}}}, "questions.a.type"),
        ({"questions": {"a": NOUL | {"threshold": 1}}}, "questions.a.threshold"),
        ({"questions": {"a": {"type": "noul"}}}, "questions.a.instructions"),
        ({"questions": {"a": NOUL | {"criteria": {"yes": "so"}}}}, "questions.a.criteria"),
        ({"questions": {"a": {"type": "choice"}}}, "questions.a.criteria"),
        ({"questions": {"a": {"type": "choice", "criteria": {}}}}, "questions.a.criteria"),
        ({"questions": {"a": CHOICE | {"criteria": ["a", "b"]}}}, "questions.a.criteria"),
        (
            {"questions": {"a": CHOICE | {"criteria": dict.fromkeys(map(str, range(256)))}}},
            "questions.a.criteria",
        ),
        ({"questions": {"a": SCORE | {"criteria": ["calm"]}}}, "questions.a.criteria"),
        ({"questions": {"a": SCORE | {"criteria": "calm"}}}, "questions.a.criteria"),
        ({"questions": {"a": SCORE | {"criteria": ["calm"] * 11}}}, "questions.a.criteria"),
        ({"assets": {"x": {"part": "x"}}}, "assets"),
        ({"priority": "high"}, "priority"),
    ],
)
def test_a_bad_request_names_its_field(server, fields, field):
    reply = ask(server, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_a_long_name_is_cut_in_the_error(server):
    reply = ask(server, questions={"long" * 1000: {"type": "noul"}})
    assert reply.json()["error"]["param"] == f"questions.{'long' * 16}.instructions"


@pytest.mark.parametrize(
    ("loop", "status"),
    [
        ("sequence.append(await sequence.sample())", 200),
        ("sequence.append(7)", 400),
        # The token that ends a turn.
        pytest.param("sequence.append(2)", 400, marks=pytest.mark.extended),
        pytest.param("return", 400, marks=pytest.mark.extended),
        ("raise ValueError", 500),
    ],
)
def test_a_decoding_loop_must_sample_the_first_token(server, repository, tmp_path, loop, status):
    copied = shutil.copytree(repository, tmp_path / "repository")
    source = f"class TritonPythonModel:\n    async def decode(self, sequence):\n        {loop}\n"
    (copied / "tiny_decoder" / "1" / "model.py").write_text(source)
    with LiveServer(copied) as other:
        reply = ask(other)
    assert reply.status_code == status
    if status == 200:
        assert reply.json()["answers"] == ask(server).json()["answers"]
    else:
        assert reply.json()["error"]["param"] == ("model" if status == 400 else None)


def with_normalizer(repository: Path, folder: Path, normalizer: dict[str, Any]) -> Path:
    copied = shutil.copytree(repository, folder)
    path = copied / "tiny_tokenizer" / "1" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": normalizer}))
    return copied


def test_spellings_that_are_the_same_tokens_count_once(repository, reference, tmp_path):
    copied = with_normalizer(repository, tmp_path / "repository", {"type": "Lowercase"})
    with LiveServer(copied) as lower:
        reply = ask(lower, questions={"urgent": NOUL}).json()
    yes, no = reference(texts()["urgent"].lower(), ["yes", "no"])
    assert reply["answers"]["urgent"]["noul"] == pytest.approx(yes / (yes + no), rel=1e-4)
    assert reply["diagnostics"]["urgent"]["label_mass"] == pytest.approx(yes + no, rel=1e-4)


def test_labels_that_are_the_same_tokens_are_rejected(repository, tmp_path):
    same = {"type": "Replace", "pattern": {"String": "B"}, "content": "A"}
    with LiveServer(with_normalizer(repository, tmp_path / "repository", same)) as other:
        reply = ask(other)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")


def test_a_model_that_cannot_but_reason_is_rejected(repository, tmp_path):
    copied = copy_with_tags(repository, tmp_path / "repository")
    template = CHAT_TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
    (copied / "tiny_tokenizer" / "1" / "chat_template.jinja").write_text(template)
    with LiveServer(copied) as server:
        reply = ask(server)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")


def test_a_model_without_a_chat_template_is_rejected(repository, tmp_path):
    copied = shutil.copytree(repository, tmp_path / "repository")
    folder = copied / "tiny_tokenizer" / "1"
    (folder / "chat_template.jinja").unlink()
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    fields.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    with LiveServer(copied) as server:
        assert ask(server).json()["error"]["param"] == "model"


def test_an_unknown_model_is_not_found(server):
    assert ask(server, model="no").status_code == 404


def test_concurrent_requests_have_the_answers_of_single_ones(server):
    states = [f"Letter {index}: {STATE}" for index in range(12)]
    with ThreadPoolExecutor(len(states)) as threads:
        together = list(threads.map(lambda state: ask(server, state=state).json()["answers"], states))
    assert together == [ask(server, state=state).json()["answers"] for state in states]


def test_the_sdk_reads_decisions(server):
    expected = ask(server).json()["answers"]
    with Client(server.url) as client:
        decisions = client.decide(STATE, QUESTIONS)

    async def decide() -> Any:
        async with AsyncClient(server.url) as client:
            return await client.decide(STATE, QUESTIONS, model="tiny")

    assert asyncio.run(decide()) == decisions
    topic, urgent, anger = (decisions[name] for name in QUESTIONS)
    assert (topic.value, topic.probabilities) == (
        expected["topic"]["choice"],
        expected["topic"]["probabilities"],
    )
    assert (urgent.value, urgent.confidence) == (expected["urgent"]["noul"], None)
    assert (anger.value, anger.confidence) == (expected["anger"]["score"], expected["anger"]["confidence"])
    assert (anger.calibrated, anger.temperature) == (False, 1.0)


def test_more_questions_than_the_engine_runs_at_a_time_are_answered(server):
    questions = {f"question {index}": NOUL for index in range(64)}
    answers = ask(server, questions=questions).json()["answers"]
    assert len(questions) > server.model.max_num_seqs
    alone = ask(server, questions={"urgent": NOUL}).json()["answers"]["urgent"]["noul"]
    assert {answer["noul"] for answer in answers.values()} == {alone}
