from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from genserve.cli.main import app
from genserve.cli.serve import print_card
from genserve.errors import GenserveError, RepositoryError
from genserve.server import ModelInfo, ServerInfo


def test_the_card_has_the_models_the_url_and_a_curl_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelInfo(name="m", max_length=2048, num_slots=32, kv_cache_bytes=3 * 2**29, precision="int8")
    broken = RepositoryError("model 'x' is broken", remedy="mend it")
    print_card(ServerInfo(url="http://127.0.0.1:1", models=(model,), errors=(broken,)))
    captured = capsys.readouterr()
    assert "m: int8, 2048 tokens of context, 32 answers at once, KV cache up to 1.5 GiB" in captured.out
    assert "Ready at http://127.0.0.1:1" in captured.out
    body = '{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "stream": true}'
    assert f"-d '{body}'" in captured.out
    assert "error[repository_error]: model 'x' is broken" in captured.err


def test_without_a_repository_there_is_an_error() -> None:
    result = CliRunner().invoke(app, ["serve", "--model-repository", "/nowhere"])
    assert isinstance(result.exception, RepositoryError)


def test_flags_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("GENSERVE_MODEL_REPOSITORY", str(tmp_path))
        monkeypatch.setenv("GENSERVE_HTTP_PORT", address.partition(":")[2])
        result = CliRunner().invoke(app, ["serve"])
    assert isinstance(result.exception, GenserveError)
    assert f"cannot listen on {address}" in result.exception.message
