"""Recorded answers of a repository: `genserve check --run`, and loads that change them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genserve.errors import InferenceError, RepositoryError
from genserve.llm import LLM
from tests.export.adapters import write_adapter
from tests.support.command_line import Ended, check_error, invoke
from tests.support.live_server import LiveServer

OPTIONS = {"max_tokens": 8, "ignore_eos": True, "return_receipt": True}
CHAT = [{"role": "user", "content": "Where is it?"}]
ASKED = {"model": "tiny", "messages": CHAT, **OPTIONS, "temperature": 0}
# A decoding loop whose answers begin as before.
CHANGED = """
class TritonPythonModel:
    async def decode(self, sequence):
        while not sequence.finished:
            logits = await sequence.logits()
            sequence.append(int(logits.argmax() if sequence.num_new_tokens < 3 else logits.argmin()))
"""


@pytest.fixture(scope="module")
def recorded(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = shutil.copytree(tiny_repository, tmp_path_factory.mktemp("recorded") / "repository")
    folder = repository / "tiny" / "recordings"
    folder.mkdir()
    with LLM("tiny", model_repository=tiny_repository) as llm:
        answers = [
            asdict(llm.chat("Where is it?", **OPTIONS)),
            asdict(llm.generate("Once", **OPTIONS, temperature=1.5, seed=3)),
        ]
        whole = asdict(llm.chat("Who?", **OPTIONS))
    (folder / "who.json").write_text(json.dumps(whole, indent=1))
    (folder / "answers.jsonl").write_text("\n\n".join(map(json.dumps, answers)))
    (folder / "notes.txt").write_text("no recording")
    config = repository / "tiny_logits" / "config.pbtxt"
    config.write_text(
        config.read_text() + '\nparameters { key: "verify_on_load" value { string_value: "true" } }\n'
    )
    return repository


@pytest.fixture
def repository(recorded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(recorded, tmp_path / "repository")


def check(repository: Path, *flags: str) -> Ended:
    return invoke(["check", "--model-repository", str(repository), "--run", *flags])


def change_answers(repository: Path) -> None:
    (repository / "tiny_decoder" / "1" / "model.py").write_text(CHANGED)


def differences(ended: Ended) -> dict[str, str | None]:
    return {row["place"]: row["difference"] for row in json.loads(ended.stdout)["recordings"]}


def test_answers_that_are_the_same_are_equal(recorded):
    ended = check(recorded)
    assert ended.exit_code == 0, ended.stdout + ended.stderr
    for place in ("answers.jsonl:1", "answers.jsonl:3", "who.json"):
        assert f"  {place}: equal: 8 tokens" in ended.stdout.splitlines()


def test_answers_of_a_batch_are_recordings(repository):
    source, folder = repository / "prompts.jsonl", repository / "tiny" / "recordings"
    source.write_text('{"prompt": "Once"}\n{"messages": [{"role": "user", "content": "Who?"}]}\n')
    words = ["generate", "--input", str(source), "--output", str(folder / "batch.jsonl"), "--max-tokens", "4"]
    ended = invoke([*words, "--set", "return_receipt=true", "--model-repository", str(repository)])
    assert ended.exit_code == 0, ended.stderr
    found = differences(check(repository, "--json"))
    assert [found[f"batch.jsonl:{line}"] for line in (1, 2)] == [None, None]


def test_each_answer_that_has_changed_is_named_with_its_first_other_token(repository):
    change_answers(repository)
    ended = check(repository, "--json")
    found = differences(ended)
    assert ended.exit_code == 1
    assert found["who.json"].startswith("token 3 of the answer was ")
    assert all(found.values())
    assert check(repository).exit_code == 1


def test_answers_of_another_tokenizer_or_template_are_different(repository):
    config = repository / "tiny_tokenizer" / "1" / "tokenizer_config.json"
    config.write_text(config.read_text().replace("assistant", "model"))
    ended = check(repository, "--json")
    assert ended.exit_code == 1
    assert all(differences(ended).values())


def test_a_receipt_that_was_changed_is_different(repository):
    path = repository / "tiny" / "recordings" / "who.json"
    path.write_text(path.read_text().replace('"finish_reason": "length"', '"finish_reason": "stop"'))
    ended = check(repository, "--json")
    assert ended.exit_code == 1
    assert [place for place, found in differences(ended).items() if found] == ["who.json"]


@pytest.mark.parametrize("text", ["{", "{}", "[" * 100_000, '[{"receipt": 1}, {"receipt": 1}]'])
def test_a_file_that_is_no_recording_is_an_error(repository, text):
    (repository / "tiny" / "recordings" / "zero.json").write_text(text)
    check_error(check(repository), RepositoryError, r"recordings/zero\.json")


def test_texts_may_hold_other_separators_of_lines(repository):
    path = repository / "tiny" / "recordings" / "answers.jsonl"
    rows = [json.loads(line) | {"text": "\u2028\u0085"} for line in path.read_text().split("\n\n")]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert check(repository).exit_code == 0


def test_a_short_queue_refuses_no_recording(repository):
    folder = repository / "tiny" / "recordings"
    line = (folder / "answers.jsonl").read_text().split("\n\n")[0]
    (folder / "many.jsonl").write_text(f"{line}\n" * 32)
    with explicit(repository, max_queue_tokens=1) as server:
        assert state(server) == ("READY", "")


def test_answers_of_an_adapter_are_recordings(repository, tiny_checkpoint, tmp_path):
    adapter = write_adapter(tmp_path / "pirate", tiny_checkpoint, targets=("q_proj", "down_proj"))
    words = ["export", str(adapter), "--base", "tiny", "--model-repository", str(repository)]
    assert invoke(words).exit_code == 0
    with LLM("pirate", model_repository=repository) as llm:
        told = asdict(llm.chat("Where is it?", **OPTIONS))
    (repository / "pirate" / "recordings").mkdir()
    (repository / "pirate" / "recordings" / "told.json").write_text(json.dumps(told))
    found = json.loads(check(repository, "--json").stdout)["recordings"]
    assert {"model": "pirate", "place": "told.json", "difference": None} in found


def test_a_repository_without_recordings_has_none(tiny_repository):
    ended = check(tiny_repository, "--json")
    assert (ended.exit_code, differences(ended)) == (0, {})


@contextmanager
def explicit(repository: Path, **settings: Any) -> Iterator[LiveServer]:
    with LiveServer(
        repository, model_control_mode="explicit", load_model=("tiny",), **settings
    ) as server:
        yield server


def reload(server: LiveServer) -> int:
    return httpx2.post(f"{server.url}/v2/repository/models/tiny/load").status_code


def answer(server: LiveServer) -> str:
    text: str = httpx2.post(f"{server.url}/v1/chat/completions", json=ASKED).json()["choices"][0]["message"][
        "content"
    ]
    return text


def state(server: LiveServer) -> tuple[str, str]:
    rows = httpx2.post(f"{server.url}/v2/repository/index").json()
    [row] = [row for row in rows if row["name"] == "tiny"]
    return row["state"], row.get("reason", "")


def test_a_reload_that_changes_answers_is_refused_and_the_old_version_answers(repository):
    decoder = repository / "tiny_decoder" / "1" / "model.py"
    before = decoder.read_text()
    with explicit(repository) as server:
        told = answer(server)
        change_answers(repository)
        assert reload(server) == 400
        assert answer(server) == told
        name, reason = state(server)
        assert name == "READY"
        assert "recordings/answers.jsonl:1: token 3 of the answer was" in reason
        decoder.write_text(before)
        assert reload(server) == 200
        assert state(server) == ("READY", "")


def test_a_reload_without_the_parameter_changes_answers(repository):
    config = repository / "tiny_logits" / "config.pbtxt"
    asked = '"verify_on_load" value { string_value: "%s"'
    config.write_text(config.read_text().replace(asked % "true", asked % "false"))
    with explicit(repository) as server:
        told = answer(server)
        change_answers(repository)
        assert reload(server) == 200
        assert answer(server) != told


def test_a_reload_that_changes_no_answer_is_served(repository):
    with explicit(repository) as server:
        decoder = repository / "tiny_decoder" / "1" / "model.py"
        decoder.write_text(decoder.read_text() + "\n# another comment\n")
        assert reload(server) == 200
        assert state(server) == ("READY", "")


def test_a_start_with_changed_answers_is_refused(repository):
    change_answers(repository)
    with pytest.raises(InferenceError) as raised:
        LLM("tiny", model_repository=repository)
    assert isinstance(raised.value.__cause__, RepositoryError)
    assert "recordings/answers.jsonl:1" in raised.value.message
