from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from genserve.cli.main import app
from genserve.errors import GenserveError, RepositoryError
from genserve.settings import ServerSettings


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


def settings_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> ServerSettings:
    """Return what a command line makes of the settings."""
    given: list[ServerSettings] = []
    monkeypatch.setattr("genserve.server.serve", lambda settings, **_: given.append(settings))
    result = CliRunner().invoke(app, ["serve", *words])
    assert result.exit_code == 0, result.output
    return given[0]


def test_without_flags_the_settings_are_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(monkeypatch) == ServerSettings()


def test_a_command_line_of_tritonserver_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--model-store=/models --model-control-mode=explicit --load-model=a --load-model=b "
        "--strict-readiness=false --exit-on-error=false --strict-model-config=true --grpc-port=9001 "
        "--metrics-port=9002 --allow-grpc=true --allow-metrics=false --cache-config=local,size=1048576 "
        "--rate-limit=execution_count --rate-limit-resource=R1:4 --model-load-thread-count=2 --id=mine "
        "--exit-timeout-secs=5 --log-verbose=1 --repository-poll-secs=3 --allow-client-shm=true "
        "--http-header-forward-pattern=x-.* --http-address=0.0.0.0 --grpc-address=127.0.0.1"
    )
    assert settings_of(monkeypatch, *words.split()) == ServerSettings(
        model_repository=(Path("/models"),),
        model_control_mode="explicit",
        load_model=("a", "b"),
        strict_readiness=False,
        exit_on_error=False,
        strict_model_config=True,
        grpc_port=9001,
        metrics_port=9002,
        allow_metrics=False,
        cache_bytes=1048576,
        rate_limit=True,
        rate_limit_resources=("R1:4",),
        load_threads=2,
        server_id="mine",
        drain_s=5,
        log_verbose=1,
        repository_poll_s=3,
        allow_client_shm=True,
        http_header_forward_pattern="x-.*",
        host="0.0.0.0",
        grpc_host="127.0.0.1",
    )


@pytest.mark.parametrize(
    "flag", ["--cache-config=redis,host=x", "--grpc-header-forward-pattern=(", "--model-control-mode=x"]
)
def test_a_flag_that_means_nothing_is_wrong_usage(flag: str) -> None:
    assert CliRunner().invoke(app, ["serve", flag]).exit_code == 2


def test_who_may_ask_is_said_by_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--allowed-host=models.example --allowed-host=*.test --allowed-origin=https://app.example "
        "--allow-unauthenticated --allow-unauthenticated-metrics=true --allow-uploaded-code "
        "--ssl-certfile=c.pem --ssl-keyfile=k.pem --ssl-ca-certs=a.pem"
    )
    assert settings_of(monkeypatch, *words.split()) == ServerSettings(
        allowed_hosts=("models.example", "*.test"),
        allowed_origins=("https://app.example",),
        allow_unauthenticated=True,
        allow_unauthenticated_metrics=True,
        allow_uploaded_code=True,
        ssl_certfile=Path("c.pem"),
        ssl_keyfile=Path("k.pem"),
        ssl_ca_certs=Path("a.pem"),
    )
