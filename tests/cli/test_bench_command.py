from __future__ import annotations

import pytest
from click.testing import Result
from typer.testing import CliRunner

from genserve.cli.main import app
from genserve.errors import ModelNotFound, Unreachable
from tests.support.live_server import LiveServer

QUICK = ("--prompt-words", "4", "--new-tokens", "12", "--waves", "2", "--seed", "1")


def bench(*flags: str) -> Result:
    return CliRunner().invoke(app, ["bench", *QUICK, *flags], catch_exceptions=False)


@pytest.mark.parametrize("api", ["chat", "generate"])
def test_each_concurrency_is_a_row_of_the_table(tiny_server: LiveServer, api: str) -> None:
    ran = bench("--url", tiny_server.url, "--api", api, "--concurrency", "1", "--concurrency", "3")
    rows = [line.split() for line in ran.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["1", "3"]
    for row in rows:
        tokens_per_s, *times_ms = map(float, row[1:])
        assert tokens_per_s > 0
        assert len(times_ms) == 4
        assert times_ms[0] <= times_ms[1]
        assert times_ms[2] <= times_ms[3]


def test_a_model_that_the_server_does_not_have_is_rejected(tiny_server: LiveServer) -> None:
    with pytest.raises(ModelNotFound, match="known there: tiny"):
        bench("nowhere", "--url", tiny_server.url)


def test_without_a_server_it_raises_unreachable() -> None:
    with pytest.raises(Unreachable):
        bench("--url", "http://127.0.0.1:9")


def test_an_https_url_is_wrong_usage() -> None:
    ran = bench("--url", "https://127.0.0.1:8000")
    assert ran.exit_code == 2
    assert "is not http://HOST:PORT" in ran.stderr
