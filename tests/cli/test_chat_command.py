from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from genserve.cli.chat_command import ChatArguments, read_arguments
from genserve.errors import InvalidRequest, ModelNotFound
from genserve.sampling.defaults import chat_sampling_params
from tests.cli.terminal import CTRL_D, Terminal
from tests.client.scripted_server import Reply, event_reply, json_reply, models_reply, scripted
from tests.support.command_line import Ended, invoke

MODELS = models_reply("m")


def answer(text: str) -> Reply:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None, "token_ids": [1]}
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    return event_reply({"choices": [choice]}, {"choices": [end]}, {"choices": [], "usage": usage}, "[DONE]")


def ask(*words: str, stdin: str | bytes = "", reply: Reply | None = None) -> tuple[Ended, dict[str, Any]]:
    """Run `genserve chat` against a server with model `m`; return its result, and the request's body."""
    # To read a single argument takes the names of the models, and so does opening one.
    is_single = sum(not word.startswith("--") for word in words[:2]) == 1
    lists = [MODELS, MODELS] if is_single else [MODELS]
    with scripted(*lists, reply or answer("Hello.")) as server:
        result = invoke(["chat", "--url", server.url, *words], stdin=stdin)
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
    result = invoke(["chat", "smollm2"], stdin="\n")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error[{InvalidRequest.code}]")
    assert "no question" in result.error


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


@pytest.mark.parametrize("word", ["mistral", "qwen3:0.5b", "./checkpoint", "hf.co/org/name/x"])
def test_a_word_that_looks_like_a_model_is_not_a_question(word: str) -> None:
    with pytest.raises(ModelNotFound, match=re.escape(repr(word))) as caught:
        read_arguments(word, None, known=lambda: NAMES)
    assert f"`genserve chat smollm2 {word}`" in caught.value.remedy
    with pytest.raises(ModelNotFound) as caught:
        read_arguments(word, None, known=lambda: NAMES, is_remote=True)
    assert caught.value.remedy.startswith("known there: smollm2, mine.")


def test_a_short_name_is_a_model_and_its_family_names_the_sizes() -> None:
    for word in ("qwen3-0.6b", "qwen3:0.6b", "hf.co/org/name:Q4_K_M"):
        assert read_arguments(word, None, known=lambda: NAMES).model == word
    with pytest.raises(ModelNotFound) as caught:
        read_arguments("llama3.2", None, known=lambda: NAMES)
    assert caught.value.remedy.startswith("did you mean llama3.2-1b or llama3.2-3b?")


@pytest.mark.parametrize("word", ["2+2?", "42", "Größe", "why?"])
def test_another_word_is_a_question(word: str) -> None:
    assert read_arguments(word, None, known=lambda: NAMES).question == word


def test_the_user_chooses_among_the_models_of_a_server(tmp_path: Path) -> None:
    lists = [models_reply("one", "two")] * 3
    with (
        scripted(*lists) as server,
        Terminal("genserve", "chat", "--url", server.url, home=tmp_path) as terminal,
    ):
        terminal.expect("2 two")
        terminal.type("3\n")
        terminal.expect("model [1]: ")
        terminal.type("2\n")
        terminal.expect("two · /help")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_a_flag_for_a_server_needs_its_url() -> None:
    result = invoke(["chat", "m", "Hi", "--ca", "x.pem"])
    assert (result.exit_code, "--ca needs --url" in result.stderr) == (2, True)


@pytest.mark.parametrize("command", [("chat", "m", "Hi"), ("generate", "Hi")])
def test_the_context_of_a_servers_model_is_the_servers(command: tuple[str, ...]) -> None:
    result = invoke([*command, "--url", "http://127.0.0.1:1", "--max-model-len", "4k"])
    assert (result.exit_code, "--max-model-len is for" in result.stderr) == (2, True)


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
    for reason, words in (("length", "after 1 token, the limit"), ("repetition", "repeated itself")):
        choice = {"index": 0, "delta": {"content": "Hm"}, "finish_reason": reason, "token_ids": [1]}
        usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
        reply = event_reply({"choices": [choice]}, {"choices": [], "usage": usage}, "[DONE]")
        result, _ = ask("m", "Hi", reply=reply)
        assert result.stdout == "Hm\n"
        assert words in result.stderr


def test_an_error_leaves_standard_output_empty() -> None:
    result, _ = ask("m", "Hi", reply=json_reply({"error": {"message": "too long"}}, status=400))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error[{InvalidRequest.code}]")
    assert result.stdout == ""


def test_text_in_another_encoding_is_rejected() -> None:
    result = invoke(["chat", "m", "Hi"], stdin=b"caf\xe9\n")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error[{InvalidRequest.code}]")
    assert "standard input is not UTF-8, at byte 3" in result.error
