from __future__ import annotations

import pytest

from genserve.cli.serve_command import print_startup_banner
from genserve.errors import RepositoryError
from genserve.server import ModelInfo, ServerInfo, VersionInfo


def test_the_card_has_the_models_the_url_and_a_curl_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelInfo(name="m", max_length=2048, max_num_seqs=32, kv_cache_bytes=3 * 2**29, precision="int8")
    broken = RepositoryError("model 'x' is broken", remedy="mend it")
    print_startup_banner(ServerInfo(url="http://127.0.0.1:1", models=(model,), errors=(broken,)))
    captured = capsys.readouterr()
    assert "m: int8, 2048 tokens of context, 32 answers at once, KV cache up to 1,536 MiB" in captured.out
    assert "Ready at http://127.0.0.1:1" in captured.out
    body = '{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "stream": true}'
    assert f"-d '{body}'" in captured.out
    assert "error[repository_error]: model 'x' is broken" in captured.err


def test_the_card_lists_every_version_and_the_ports(capsys: pytest.CaptureFixture[str]) -> None:
    versions = (
        VersionInfo(name="m", version=1, state="READY", reason=""),
        VersionInfo(name="x", version=2, state="UNAVAILABLE", reason="no weights"),
    )
    print_startup_banner(
        ServerInfo(
            url="http://h:1",
            grpc_address="h:2",
            metrics_url="http://h:3/metrics",
            models=(),
            versions=versions,
            errors=(),
        )
    )
    out = capsys.readouterr().out
    assert "UNAVAILABLE: no weights" in out
    assert "over gRPC at h:2" in out
    assert "Metrics at http://h:3/metrics" in out
    assert "curl" not in out
    assert "Ready at http://h:1 (API: /docs)" in out    # nothing there generates text
