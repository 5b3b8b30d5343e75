from __future__ import annotations

import socket
from pathlib import Path

import pytest

from genserve.cli.main import COMMANDS
from genserve.cli.serve_command import print_startup_banner
from genserve.cli.tritonserver_flags import REJECTED_FLAGS
from genserve.errors import RepositoryError
from genserve.repository.model_versions import IndexEntry, ModelState
from genserve.server import ModelInfo, ServerInfo
from genserve.settings import ServerSettings
from tests.cli.test_model_choice import add_model
from tests.support.command_line import invoke


def test_trace_and_metrics_flags_are_those_of_tritonserver(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--trace-config triton,file=/t.json --trace-config=level=TIMESTAMPS --trace-config rate=1 "
        "--metrics-config=counter_latencies=false --metrics-config histogram_latencies=true "
        "--allow-cpu-metrics=false --allow-gpu-metrics=false --metrics-interval-ms=500"
    )
    assert settings_of(monkeypatch, *words.split()) == ServerSettings(
        trace_config=("triton,file=/t.json", "level=TIMESTAMPS", "rate=1"),
        metrics_config=("counter_latencies=false", "histogram_latencies=true"),
        allow_cpu_metrics=False,
        metrics_interval_ms=500,
    )


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--trace-config=mode=opentelemetry", "the only mode is triton"),
        ("--trace-config=level=TIMESTAMPS", "trace file name is not given"),
        ("--metrics-config=summary_latencies=true", "summaries are not supported"),
        ("--allow-gpu-metrics=true", "there are no nv_gpu_* metrics"),
    ],
)
def test_invalid_trace_and_metrics_flags_are_rejected_at_the_start(
    tmp_path: Path, flag: str, text: str
) -> None:
    result = invoke(["serve", "--model-repository", str(tmp_path), flag])
    assert result.exit_code != 0
    assert text in result.error


def test_a_missing_repository_is_an_error() -> None:
    result = invoke(["serve", "--model-repository", "/nowhere"])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error[{RepositoryError.code}]")


def test_flags_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_model(tmp_path, "m")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("GENSERVE_MODEL_REPOSITORY", str(tmp_path))
        monkeypatch.setenv("GENSERVE_HTTP_PORT", address.partition(":")[2])
        result = invoke(["serve"])
    assert result.exit_code == 1
    assert f"cannot listen on {address}" in result.error
    assert "--http-port, and for a second server with --grpc-port and --metrics-port too" in result.error


def settings_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> ServerSettings:
    """Return the settings that a command line sets."""
    given: list[ServerSettings] = []
    monkeypatch.setattr("genserve.server.serve", lambda settings, **_: given.append(settings))
    result = invoke(["serve", *words])
    assert result.exit_code == 0, result.error
    return given[0]


def test_without_flags_the_settings_are_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(monkeypatch) == ServerSettings()


def test_a_command_line_of_tritonserver_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--model-store=/models --model-control-mode=explicit --load-model=a --load-model=b "
        "--strict-readiness=false --exit-on-error=false --strict-model-config=true --grpc-port=9001 "
        "--strict-repository-paths=true "
        "--metrics-port=9002 --allow-grpc=true --allow-metrics=false --cache-config=local,size=1048576 "
        "--rate-limit=execution_count --rate-limit-resource=R1:4 --model-load-thread-count=2 --id=mine "
        "--exit-timeout-secs=5 --log-verbose=1 --repository-poll-secs=3 --allow-client-shm=true "
        "--http-header-forward-pattern=x-.* --http-address=0.0.0.0 --grpc-address=127.0.0.1 "
        "--log-info=false --log-warning=true --log-error=false --log-format=ISO8601 --log-file=/var/log/x "
        "--backend-config=onnxruntime,default-max-batch-size=8 --backend-config=python,thread-pool-size=8 "
        "--grpc-infer-response-compression-level=medium --reuse-http-port=true "
        "--reuse-grpc-port=1 --grpc-keepalive-time=60000 "
        "--grpc-keepalive-permit-without-calls=1 --grpc-max-connection-age=5000 "
        "--grpc-http2-max-ping-strikes=0 --model-namespacing=false --allow-http=1 --allow-sagemaker=False "
        "--model-load-retry-count=0 --http-restricted-api=trace,logging:admin-key=s "
        "--grpc-restricted-protocol=model-repository:admin-key=s"
    )
    assert settings_of(monkeypatch, *words.split()) == ServerSettings(
        model_repository=(Path("/models"),),
        model_control_mode="explicit",
        load_model=("a", "b"),
        strict_readiness=False,
        exit_on_error=False,
        strict_model_config=True,
        strict_repository_paths=True,
        grpc_port=9001,
        metrics_port=9002,
        allow_metrics=False,
        cache_config="local,size=1048576",
        rate_limit="execution_count",
        rate_limit_resources=("R1:4",),
        load_threads=2,
        server_id="mine",
        drain_s=5,
        log_verbose=1,
        log_info=False,
        log_error=False,
        log_format="ISO8601",
        log_file=Path("/var/log/x"),
        repository_poll_s=3,
        allow_client_shm=True,
        http_header_forward_pattern="x-.*",
        host="0.0.0.0",
        grpc_host="127.0.0.1",
        backend_config=("onnxruntime,default-max-batch-size=8", "python,thread-pool-size=8"),
        http_restricted_api=("trace,logging:admin-key=s",),
        grpc_restricted_protocol=("model-repository:admin-key=s",),
        reuse_http_port=True,
        reuse_grpc_port=True,
        grpc_infer_response_compression_level="medium",
        grpc_keepalive_time=60000,
        grpc_keepalive_permit_without_calls=True,
        grpc_http2_max_ping_strikes=0,
        grpc_max_connection_age=5000,
    )


@pytest.mark.parametrize(
    "flag",
    [
        "--cache-config=redis,host=x",
        "--grpc-header-forward-pattern=(",
        "--model-control-mode=x",
        "--log-format=x",
    ],
)
def test_an_invalid_value_of_a_flag_is_wrong_usage(flag: str) -> None:
    assert invoke(["serve", flag]).exit_code == 2


def test_flags_limit_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--max-queue=8", "--max-queue-tokens=0", "--max-queue-wait-s=2.5")
    wanted = ServerSettings(max_queue=8, max_queue_tokens=0, max_queue_wait_s=2.5)
    assert settings_of(monkeypatch, *words) == wanted


def test_flags_control_the_access(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--http-thread-count=16", "--http-thread-count is a flag of tritonserver"),
        ("--http-thread-count 16", "drop the flag"),
        ("--model-namespacing=true", "rename one of two models of the same name"),
        ("--allow-http=false", "--http-address=127.0.0.1"),
        ("--grpc-use-ssl=true", "--ssl-certfile"),
        ("--grpc-use-ssl false --grpc-server-cert x.pem", "--ssl-certfile"),
        ("--host-policy=cpu_0,numa-node=0", "numactl"),
        ("--cache-directory=/opt/caches", "--cache-config=local,size=BYTES"),
    ],
)
def test_an_unsupported_flag_of_tritonserver_is_rejected_with_a_remedy(words: str, message: str) -> None:
    result = invoke(["serve", *words.split()])
    assert result.exit_code == 2
    assert message in " ".join(result.error.replace("│", " ").split())


def test_no_supported_flag_is_rejected() -> None:
    parameters = COMMANDS["serve"].parser("serve").parameters
    assert not REJECTED_FLAGS.keys() & {name for parameter in parameters for name in parameter.names}


def test_an_unknown_backend_setting_is_rejected_at_the_start(tmp_path: Path) -> None:
    words = ["serve", "--model-repository", str(tmp_path), "--backend-config=onnxruntime,threads=4"]
    result = invoke(words)
    assert result.exit_code == 1
    assert "default-max-batch-size" in result.error


def test_the_banner_has_the_models_the_url_and_a_curl_command(capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelInfo(name="m", context="2048", max_num_seqs=32, kv_cache_bytes=3 * 2**29, precision="int8")
    broken = RepositoryError("model 'x' is broken", remedy="mend it")
    print_startup_banner(ServerInfo(url="http://127.0.0.1:1", models=(model,), errors=(broken,)))
    captured = capsys.readouterr()
    assert "m: int8, context length 2048, up to 32 sequences, KV cache up to 1,536 MiB" in captured.out
    assert "Ready at http://127.0.0.1:1" in captured.out
    assert """-d '{"model": "m", "messages": [{"role": "user", "content": """ in captured.out
    assert "error[repository_error]: model 'x' is broken" in captured.err


def test_a_model_that_is_not_there_is_an_error_before_a_port_opens(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    result = invoke(["serve", "min", "--model-repository", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error[{RepositoryError.code}]")
    assert "'min'" in result.error
    assert str(tmp_path) in result.error
    assert "did you mean mine?" in result.error


def test_the_first_steps_have_the_key_and_the_name_that_a_server_requires(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, other = (
        ModelInfo(name=name, context="8", max_num_seqs=1, kv_cache_bytes=1, precision="int8")
        for name in "ab"
    )
    print_startup_banner(ServerInfo(url="http://h:1", models=(one,), errors=()))
    steps = capsys.readouterr().out
    assert "  genserve chat --url http://h:1\n" in steps
    assert "KEY" not in steps
    print_startup_banner(ServerInfo(url="http://h:1", models=(one, other), needs_key=True, errors=()))
    steps = capsys.readouterr().out
    assert "  export GENSERVE_API_KEY=KEY" in steps
    assert "  genserve chat a --url http://h:1\n" in steps
    assert '/v1/chat/completions -H "Authorization: Bearer $GENSERVE_API_KEY" -H' in steps


def test_the_banner_lists_every_version_and_the_ports(capsys: pytest.CaptureFixture[str]) -> None:
    versions = (
        IndexEntry(name="m", version=1, state=ModelState.READY, reason=""),
        IndexEntry(name="m_decoder", version=1, state=ModelState.READY, reason=""),
        IndexEntry(name="x", version=2, state=ModelState.UNAVAILABLE, reason="no weights"),
        IndexEntry(name="x_decoder"),
    )
    print_startup_banner(
        ServerInfo(
            url="http://h:1",
            grpc_address="h:2",
            metrics_url="http://h:3/metrics",
            models=(),
            versions=versions,
            stages=frozenset({"m_decoder", "x_decoder"}),
            errors=(),
        )
    )
    out = capsys.readouterr().out
    assert "UNAVAILABLE: no weights" in out
    assert "m_decoder" not in out   # it is as ready as its text model
    assert "x_decoder" in out
    assert "over gRPC at h:2" in out
    assert "Metrics at http://h:3/metrics" in out
    assert "curl" not in out
    assert "Ready at http://h:1 (API: /docs)" in out    # nothing there generates text
