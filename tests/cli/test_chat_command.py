from __future__ import annotations

from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from genserve.cli.chat_command import ChatArguments, read_arguments
from genserve.cli.main import app
from genserve.errors import InvalidRequest, ModelNotFound
from genserve.sampling.defaults import chat_sampling_params
from tests.client.scripted_server import Reply, event_reply, json_reply, models_reply, scripted

MODELS = models_reply("m")


def answer(text: str) -> Reply:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None, "token_ids": [1]}
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    return event_reply({"choices": [choice]}, {"choices": [end]}, {"choices": [], "usage": usage}, "[DONE]")


def ask(*words: str, stdin: str | bytes = "", reply: Reply | None = None) -> tuple[Result, dict[str, Any]]:
    """Run `genserve chat` against a server with model `m`; return its result, and the request's body."""
    # To read a single argument takes the names of the models, and so does opening one.
    is_single = sum(not word.startswith("--") for word in words[:2]) == 1
    lists = [MODELS, MODELS] if is_single else [MODELS]
    with scripted(*lists, reply or answer("Hello.")) as server:
        result = CliRunner().invoke(app, ["chat", "--url", server.url, *words], input=stdin)
    return result, server.received[-1].body


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_a_question_is_answered_once_and_only_the_answer_is_printed() -> None:
    result, body = ask("m", "Hi", "--system", "Be brief.")
    assert (result.exit_code, result.stdout) == (0, "Hello.\n")
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, user("Hi")]


def test_standard_input_is_one_message() -> None:
    result, body = ask("m", stdin="Hi\n\n  Go away  \n")
    assert (result.exit_code, result.stdout) == (0, "Hello.\n")
    assert body["messages"] == [user("Hi\n\n  Go away  ")]


def test_standard_input_follows_the_question_after_an_empty_line() -> None:
    _, body = ask("Summarise this.", stdin="One.\nTwo.\n")
    assert body["messages"] == [user("Summarise this.\n\nOne.\nTwo.")]


def test_without_a_question_and_text_there_is_nothing_to_answer() -> None:
    result = CliRunner().invoke(app, ["chat", "smollm2"], input="\n")
    assert isinstance(result.exception, InvalidRequest)
    assert "no question" in result.exception.message


NAMES = ("smollm2", "mine")


@pytest.mark.parametrize(
    ("words", "model", "question"),
    [
        ((), None, None),
        (("mine",), "mine", None),
        (("Org/Name",), "Org/Name", None),
        (("Why is the sky blue?",), None, "Why is the sky blue?"),
        (("Hello",), None, "Hello"),
        (("mine", "smollm2"), "mine", "smollm2"),
        (("other", "Hi"), "other", "Hi"),
    ],
)
def test_one_argument_is_the_model_or_the_question(
    words: tuple[str, ...], model: str | None, question: str | None
) -> None:
    first, second = (*words, None, None)[:2]
    wanted = ChatArguments(model=model, question=question)
    assert read_arguments(first, second, known=lambda: NAMES) == wanted


def test_the_variable_is_the_model_where_the_arguments_name_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENSERVE_MODEL", "other")
    for words, model in (((None, None), "other"), (("Hi", None), "other"), (("a", "Hi"), "a")):
        assert read_arguments(*words, known=lambda: NAMES).model == model


def test_a_word_close_to_a_name_is_not_a_question() -> None:
    with pytest.raises(ModelNotFound, match="'smolm2'") as caught:
        read_arguments("smolm2", None, known=lambda: NAMES)
    assert caught.value.remedy.startswith("did you mean smollm2?")


def test_the_flags_become_fields_of_the_request() -> None:
    _, body = ask(
        "m", "Hi", "--temperature", "0", "--max-tokens", "3", "--seed", "7", "--set", "min_p=0.2"
    )
    assert (body["model"], body["temperature"], body["max_tokens"], body["seed"]) == ("m", 0, 3, 7)
    assert body["min_p"] == 0.2


def test_every_answer_ends() -> None:
    _, body = ask("m", "Hi")
    assert body["max_tokens"] == 1024
    assert body["repetition_detection"]["min_count"] > 1
    _, body = ask("m", "Hi", "--set", "max_tokens=none", "--set", "repetition_detection=none")
    assert (body.get("max_tokens"), body.get("repetition_detection")) == (None, None)


def test_the_sampling_is_what_the_model_recommends() -> None:
    own = chat_sampling_params({"repetition_penalty": 1.1})
    assert 0 < own["temperature"] < 1
    assert own["min_p"] > 0
    for recommended in ({"temperature": 0.2}, {"top_k": 64, "top_p": 0.95}):
        assert chat_sampling_params(recommended).keys() == {"repetition_detection"}


def test_what_cut_an_answer_short_is_said_on_stderr() -> None:
    for reason, words in (("length", "after 1 tokens, the limit"), ("repetition", "repeated itself")):
        choice = {"index": 0, "delta": {"content": "Hm"}, "finish_reason": reason, "token_ids": [1]}
        usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
        reply = event_reply({"choices": [choice]}, {"choices": [], "usage": usage}, "[DONE]")
        result, _ = ask("m", "Hi", reply=reply)
        assert result.stdout == "Hm\n"
        assert words in result.stderr


def test_an_error_leaves_standard_output_empty() -> None:
    result, _ = ask("m", "Hi", reply=json_reply({"error": {"message": "too long"}}, status=400))
    assert isinstance(result.exception, InvalidRequest)
    assert result.stdout == ""


def test_text_in_another_encoding_is_rejected() -> None:
    result = CliRunner().invoke(app, ["chat", "m", "Hi"], input=b"caf\xe9\n")
    assert isinstance(result.exception, InvalidRequest)
    assert result.exception.message == "standard input is not UTF-8, at byte 3"
