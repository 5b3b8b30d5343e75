"""The routers of `python -m conformance --through`, and what is compared; no router runs."""

from __future__ import annotations

import pytest

from conformance.client_programs import Row
from conformance.result_table import results
from conformance.router_programs import FOLDER, compared, router_program
from tests.support.live_server import LiveServer

ROUTERS = sorted(folder.name for folder in FOLDER.iterdir())


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_pinned_and_has_a_command(name):
    program = router_program(name)
    [requirement] = (program.folder / "requirements.txt").read_text().splitlines()
    assert requirement.startswith(f"{program.command}==")
    assert "--policy=cache_aware" in program.arguments


def test_an_unknown_router_is_rejected():
    with pytest.raises(SystemExit, match="unknown router 'no'; there are sglang-router, vllm-router"):
        router_program("no")


def test_only_failures_are_excused_by_a_limit_of_the_router():
    program = router_program("sglang-router")
    rows = [Row(name="models", outcome="failed"), Row(name="chat", outcome="failed", detail="cut")]
    [models, chat] = results("openai", "3", {"scripted": program.with_limits(rows)})
    assert (models.scripted, models.detail, models.works) == ("router", "has no GET /v1/models/{id}", True)
    assert (chat.scripted, chat.detail, chat.works) == ("failed", "cut", False)
    assert program.with_limits([Row(name="models", outcome="ok")])[0].outcome == "ok"


def test_the_same_server_answers_as_the_server(tiny_server):
    rows = compared(tiny_server.url, tiny_server.url, model="tiny")
    assert [row for row in rows if row.outcome != "ok"] == []
    assert "as the server: chat, streamed" in [row.name for row in rows]


def test_another_answer_fails_its_rows(tiny_server, tiny_repository):
    with LiveServer(tiny_repository, override_generation_config='{"repetition_penalty": 0.01}') as other:
        rows = compared(other.url, tiny_server.url, model="tiny")
    failed = {row.name.removeprefix("as the server: ") for row in rows if row.outcome == "failed"}
    assert failed == {"chat", "chat, streamed", "completion", "completion, streamed"}
