from __future__ import annotations

import json
from typing import Any

import pytest

from genserve.errors import InvalidRequest, ModelNotFound
from tests.client.scripted_server import Reply, event_reply, models_reply, scripted
from tests.support.command_line import Ended, invoke

MODELS = models_reply("m")


def event(token_id: int, text: str, whole: str | None = None) -> dict[str, Any]:
    details = {"finish_reason": "length", "generated_tokens": 2, "input_length": 4, "seed": None}
    token = {"id": token_id, "text": text, "logprob": -0.5, "special": False}
    return {"token": token, "generated_text": whole, "details": details if whole is not None else None}


ANSWER = event_reply(event(1, " is\x1b[2J"), event(2, " hot", " is\x1b[2J hot"))


def generate(*arguments: str, stdin: str = "", reply: Reply = ANSWER) -> tuple[Ended, dict[str, Any]]:
    with scripted(MODELS, reply) as server:
        result = invoke(["generate", "--url", server.url, *arguments], stdin=stdin)
    return result, server.received[-1].body


def test_the_text_is_printed_unchanged_into_a_pipe() -> None:
    result, _ = generate("Tea")
    assert result.stdout == " is\x1b[2J hot\n"


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_without_a_prompt_stdin_is_read_without_its_last_line_end(arguments: tuple[str, ...]) -> None:
    _, body = generate(*arguments, stdin="Tea\nis\n\n")
    assert body["inputs"] == "Tea\nis\n"


def test_input_in_another_encoding_is_rejected_with_its_position() -> None:
    result = invoke(["generate"], stdin=b"caf\xe9")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error[{InvalidRequest.code}]")
    assert "standard input is not UTF-8, at byte 3" in result.error


def test_line_ends_of_other_systems_are_read_as_line_feeds() -> None:
    _, body = generate(stdin="Tea\r\nis\r\n")
    assert body["inputs"] == "Tea\nis"


def test_flags_become_fields_of_the_request() -> None:
    flags = "--max-tokens 2 --temperature 0.5 --stop a --stop b --seed 7"
    _, body = generate("Tea", *flags.split())
    assert body["model"] == "m"
    assert body["parameters"] == {
        "details": True,
        "do_sample": True,
        "max_new_tokens": 2,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "seed": 7,
    }


def test_any_other_parameter_can_be_set() -> None:
    flags = '--set repetition_penalty=1.2 --set bad_words=["a"] --set stop=b'
    _, body = generate("Tea", *flags.split())
    parameters = body["parameters"]
    assert (parameters["repetition_penalty"], parameters["bad_words"]) == (1.2, ["a"])
    assert parameters["stop"] == ["b"]


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("min_p", "--set min_p has no value"),
        ("min_p=2", "min_p must be between"),
        ("minp=0.1", "no sampling parameter 'minp'"),
    ],
)
def test_an_invalid_assignment_is_rejected_before_the_request(assignment: str, words: str) -> None:
    with scripted(MODELS) as server:
        result = invoke(["generate", "Tea", "--url", server.url, "--set", assignment])
        assert not server.received
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error[{InvalidRequest.code}]")
    assert words in result.error


def test_json_is_one_object_with_the_whole_answer() -> None:
    result, _ = generate("Tea", "--json")
    assert json.loads(result.stdout) == {
        "model": "m",
        "text": " is\x1b[2J hot",
        "token_ids": [1, 2],
        "finish_reason": "length",
        "stop_reason": None,
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "timings": None,
            "cache_match": None,
            "receipt": None,
        },
    }
    assert "\x1b" not in result.stdout


def test_the_url_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(MODELS, ANSWER) as server:
        monkeypatch.setenv("GENSERVE_BASE_URL", server.url)
        assert invoke(["generate", "Tea"]).exit_code == 0


def test_an_unknown_model_is_rejected_with_the_names_of_the_others() -> None:
    result, _ = generate("Tea", "--model", "x", reply=ANSWER)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error[{ModelNotFound.code}]")
    assert "known there: m" in result.error
