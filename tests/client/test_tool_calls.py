"""Tool calls of both clients and in process, with a chat template that shows the names of the tools."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genserve.client import Client
from genserve.completion import Completion, FinishReason
from genserve.errors import InvalidRequest
from genserve.llm import LLM
from genserve.prompt import ToolChoice
from tests.client.either_client import BlockingClient
from tests.support.live_server import LiveServer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}<tool_call>"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "number": {"enum": [1, 20, 300]}},
    "required": ["kind", "number"],
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in "fg"]


@pytest.fixture(scope="module")
def repository(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tools") / "repository"
    shutil.copytree(tiny_repository, root)
    (root / "tiny_tokenizer" / "1" / "chat_template.jinja").write_text(TEMPLATE)
    return root


@pytest.fixture(scope="module")
def callers(repository: Path) -> Iterator[list[Any]]:
    """The model in this process, and both clients."""
    with (
        LiveServer(repository) as server,
        LLM("tiny", model_repository=repository) as llm,
        Client(server.url) as client,
        BlockingClient(server.url) as async_client,
    ):
        yield [llm, client, async_client]


def called(answer: Completion) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer.tool_calls]


NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        "auto",
        pytest.param("none", marks=pytest.mark.extended),
        pytest.param(NAMED, marks=pytest.mark.extended),
    ],
)
def test_all_callers_get_the_same_calls(callers: list[Any], choice: ToolChoice) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 90, "seed": 3, "temperature": 1.0}
    answers = [caller.chat("Hi", **options) for caller in callers]
    answers += [caller.chat_stream("Hi", **options).final() for caller in callers]
    assert [called(answer) for answer in answers] == [called(answers[0])] * 6
    assert {(answer.text, answer.finish_reason) for answer in answers} == {
        (answers[0].text, answers[0].finish_reason)
    }
    match choice:
        case "required":
            assert called(answers[0])
            assert answers[0].text == ""
        case "none":
            assert not called(answers[0])
        case {"type": "function"}:
            assert [name for name, _ in called(answers[0])] == ["g"]
            assert answers[0].finish_reason is FinishReason.STOP


def test_an_unknown_choice_is_rejected(callers: list[Any]) -> None:
    for caller in callers:
        for choice in ("always", {"type": "function"}, {"type": "function", "function": {"name": "h"}}):
            with pytest.raises(InvalidRequest) as caught:
                caller.chat("Hi", tools=TOOLS, tool_choice=choice)
            assert str(caught.value.field).startswith("tool_choice")


def test_the_tool_that_cannot_be_held_to_its_schema_is_named(callers: list[Any]) -> None:
    bad = {"name": "bad", "parameters": {"properties": {"x": {"type": "text"}}}}
    for caller in callers:
        with pytest.raises(InvalidRequest) as raised:
            caller.chat("Hi", tools=[*TOOLS, {"type": "function", "function": bad}])
        assert raised.value.field == "tools[2].function.parameters"
