from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from genserve.cli.main import app
from genserve.errors import InvalidRequest
from tests.client.scripted_server import Reply, event_reply, json_reply, models_reply, scripted

MODELS = models_reply("m")


def answer(text: str) -> Reply:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None, "token_ids": [1]}
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    return event_reply({"choices": [choice]}, {"choices": [end]}, {"choices": [], "usage": usage}, "[DONE]")


def test_each_line_of_a_pipe_is_a_turn_and_only_answers_are_printed() -> None:
    with scripted(MODELS, answer("Hello."), answer("Bye.")) as server:
        result = CliRunner().invoke(
            app, ["chat", "--url", server.url, "--system", "Be brief."], input="Hi\n\n  Go away  \n"
        )
    assert result.exit_code == 0
    assert result.stdout == "Hello.\nBye.\n"
    assert server.received[-1].body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Go away"},
    ]


def test_the_flags_become_fields_of_the_request() -> None:
    with scripted(MODELS, answer("Hello.")) as server:
        CliRunner().invoke(
            app,
            ["chat", "m", "--url", server.url, "--temperature", "0", "--max-tokens", "3", "--seed", "7",
             "--set", "min_p=0.1"],
            input="Hi",
        )
    body = server.received[-1].body
    assert (body["model"], body["temperature"], body["max_tokens"], body["seed"]) == ("m", 0, 3, 7)
    assert body["min_p"] == 0.1


def test_the_temperature_is_what_the_model_recommends() -> None:
    for defaults, expected in (({}, 0.7), ({"default_sampling_params": {"temperature": 0.2}}, 0.2)):
        listed = json_reply({"object": "list", "data": [{"id": "m", **defaults}]})
        with scripted(listed, answer("Hello.")) as server:
            CliRunner().invoke(app, ["chat", "--url", server.url], input="Hi")
        assert server.received[-1].body["temperature"] == expected


def test_a_line_in_another_encoding_is_rejected_by_its_number() -> None:
    with scripted(MODELS, answer("Hello.")) as server:
        result = CliRunner().invoke(app, ["chat", "--url", server.url], input=b"Hi\n\ncaf\xe9\n")
    assert result.stdout == "Hello.\n"
    assert isinstance(result.exception, InvalidRequest)
    assert result.exception.message == "line 3 of standard input is not UTF-8, at byte 3"
