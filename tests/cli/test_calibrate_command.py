"""`genserve calibrate` on labelled sets that the tests make, and the server that uses what it wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from genserve.cli.calibrate_command import read_labelled
from genserve.errors import RepositoryError
from genserve.textmodel.calibration import read_calibration
from tests.export.adapters import write_adapter
from tests.support.command_line import check_error, invoke
from tests.support.live_server import LiveServer

CHOICE = {"type": "choice", "criteria": {"sea": None, "hill": None, "town": None}}
NOUL = {"type": "noul", "instructions": "Wet?"}
SCORE = {"type": "score", "criteria": ["no", "so", "yes"]}
QUESTIONS = {"place": CHOICE, "wet": NOUL, "far": SCORE}
# The random model is less sure than it should be.
TEMPERATURES = {"choice": 0.3, "noul": 0.4, "score": 0.35}
NUM_LINES = 80


@pytest.fixture(scope="module")
def repository(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(tiny_repository, tmp_path_factory.mktemp("calibrate") / "repository")


def ask(server: LiveServer, state: str, *, post: Callable[..., Any] = httpx2.post) -> dict[str, Any]:
    body = {"state": state, "questions": QUESTIONS}
    answers: dict[str, Any] = post(f"{server.url}/v1/systemone", json=body).json()["answers"]
    return answers


def probabilities_of(answer: dict[str, Any]) -> np.ndarray:
    if answer["type"] == "noul":
        return np.array([answer["noul"], 1 - answer["noul"]])
    return np.array([*answer["probabilities"].values()])


def at_temperature(found: np.ndarray, temperature: float) -> np.ndarray:
    weights = found ** (1 / temperature)
    return weights / weights.sum()


@pytest.fixture(scope="module")
def raw(repository: Path) -> dict[str, dict[str, Any]]:
    """The answers of the model without a calibration, by state."""
    with LiveServer(repository) as server, httpx2.Client() as client:
        states = [f"Walk {index}" for index in range(NUM_LINES)]
        return {state: ask(server, state, post=client.post) for state in states}


@pytest.fixture(scope="module")
def labelled(raw, tmp_path_factory) -> Path:
    """Labels that come true with the model's probabilities at `TEMPERATURES`."""
    random = np.random.default_rng(0)
    lines = []
    for state, answers in raw.items():
        labels: dict[str, Any] = {}
        for name, answer in answers.items():
            chances = at_temperature(probabilities_of(answer), TEMPERATURES[answer["type"]])
            index = int(random.choice(len(chances), p=chances))
            options = {"choice": ["sea", "hill", "town"], "noul": [True, False], "score": [0, 1, 2]}
            labels[name] = options[answer["type"]][index]
        lines.append(json.dumps({"state": state, "questions": QUESTIONS, "answers": labels}))
    path = tmp_path_factory.mktemp("labelled") / "labelled.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def fits(repository: Path, labelled: Path) -> dict[str, dict[str, float]]:
    ended = invoke(["calibrate", "tiny", str(labelled), "--model-repository", str(repository), "--json"])
    assert ended.exit_code == 0, ended.stderr
    found: dict[str, dict[str, float]] = json.loads(ended.stdout)["fits"]
    return found


def test_the_temperatures_of_a_labelled_set_are_found(fits):
    for kind, fit in fits.items():
        assert fit["num_answers"] == NUM_LINES
        assert fit["temperature"] == pytest.approx(TEMPERATURES[kind], rel=0.4), kind
        assert fit["error_after"] < fit["error_before"] / 2


def test_a_server_answers_with_the_temperatures_as_long_as_the_files_are_the_same(repository, raw, fits):
    with LiveServer(repository) as server:
        answers = ask(server, "Walk 7")
    for name, answer in answers.items():
        temperature = fits[answer["type"]]["temperature"]
        assert (answer["calibrated"], answer["temperature"]) == (True, temperature)
        expected = at_temperature(probabilities_of(raw["Walk 7"][name]), temperature)
        assert np.allclose(probabilities_of(answer), expected, atol=1e-6)


def test_other_files_are_not_calibrated(repository, raw, fits, tmp_path):
    changed = shutil.copytree(repository, tmp_path / "changed")
    config = changed / "tiny_tokenizer" / "1" / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|im_start|>' +", "<|im_start|>' +  "))
    with LiveServer(changed) as server:
        answers = ask(server, "Walk 7")
    assert {(answer["calibrated"], answer["temperature"]) for answer in answers.values()} == {(False, 1.0)}


def test_an_adapter_does_not_calibrate_its_base(tiny_repository, tiny_checkpoint, labelled, tmp_path):
    repository = shutil.copytree(tiny_repository, tmp_path / "repository")
    adapter = write_adapter(tmp_path / "pirate", tiny_checkpoint, targets=("q_proj",))
    where = ["--model-repository", str(repository)]
    assert invoke(["export", str(adapter), "--base", "tiny", *where]).exit_code == 0
    check_error(invoke(["calibrate", "pirate", str(labelled), *where]), RepositoryError, "adapter")
    assert read_calibration(repository / "tiny_logits" / "1") is None


def test_states_may_hold_other_separators_of_lines(tmp_path):
    line = {"state": "a\u2028b\u0085c", "questions": QUESTIONS, "answers": {"wet": True}}
    path = tmp_path / "labelled.jsonl"
    path.write_text(f"{json.dumps(line, ensure_ascii=False)}\n" * 20)
    assert [answer.line for answer in read_labelled(path)] == [*range(1, 21)]


def test_a_dry_run_writes_nothing(tiny_repository, labelled, tmp_path):
    repository = shutil.copytree(tiny_repository, tmp_path / "repository")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(labelled.read_text().splitlines(keepends=True)[:20]))
    words = ["calibrate", "tiny", str(few), "--model-repository", str(repository)]
    ended = invoke([*words, "--dry-run"])
    assert ended.exit_code == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == len(TEMPERATURES)
    assert read_calibration(repository / "tiny_logits" / "1") is None


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        json.dumps({"questions": QUESTIONS, "answers": {}}),
        json.dumps({"state": "x", "questions": [], "answers": {}}),
        json.dumps({"state": "x", "questions": QUESTIONS}),
        json.dumps({"state": "x", "questions": QUESTIONS, "answers": {"no": True}}),
        json.dumps({"state": "x", "questions": QUESTIONS, "answers": {"wet": "yes"}}),
        json.dumps({"state": "x", "questions": QUESTIONS, "answers": {"far": 3}}),
        json.dumps({"state": "x", "questions": QUESTIONS, "answers": {"far": True}}),
        json.dumps({"state": "x", "questions": QUESTIONS, "answers": {"place": "moon"}}),
        json.dumps({"state": "x", "questions": QUESTIONS, "answers": {"place": []}}),
        json.dumps({"state": "x", "questions": {"wet": {"type": "box"}}, "answers": {"wet": True}}),
        json.dumps({"state": "x", "questions": {"wet": True}, "answers": {"wet": True}}),
    ],
)
def test_a_bad_line_is_named_before_the_model_is_loaded(tmp_path, line):
    good = json.dumps({"state": "x", "questions": QUESTIONS, "answers": {"wet": True}})
    path = tmp_path / "labelled.jsonl"
    path.write_text(f"{good}\n\n{line}\n")
    ended = invoke(["calibrate", "no-such-model", str(path), "--model-repository", str(tmp_path)])
    assert ended.exit_code == 1
    assert ended.stderr.startswith(f"error[invalid_request]: line 3 of {path}")


def test_few_answers_are_rejected(tmp_path):
    path = tmp_path / "labelled.jsonl"
    line = {"state": "x", "questions": QUESTIONS, "answers": {"wet": True}}
    path.write_text(f"{json.dumps(line)}\n" * 19)
    ended = invoke(["calibrate", "tiny", str(path), "--model-repository", str(tmp_path)])
    assert (ended.exit_code, ended.stdout) == (1, "")
