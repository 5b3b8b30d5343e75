"""The command `genserve serve`, and the banner that it prints when the server is ready."""

from __future__ import annotations

import gc
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from genserve.cli.flags import ModelRepositories
from genserve.settings import ServerSettings

if TYPE_CHECKING:
    from genserve.server import ServerInfo, VersionInfo

__all__ = ["print_startup_banner", "serve"]


_DEFAULTS = ServerSettings()
_PORTS: dict[str, Any] = {"min": 0, "max": 65535}
_COMPRESSION_LEVELS = ("none", "low", "medium", "high")     # gRPC knows them by number
# The headings of `--help`.
_MODELS, _PLACE, _GRPC, _ACCESS, _CLIENTS, _LOG = (
    "Models", "Ports", "Connections of gRPC", "Access", "Clients", "Log",
)  # fmt: skip


def _flag(*names: str, help: str, panel: str, **more: Any) -> Any:  # noqa: A002  # typer's own word
    """Return an option with its twin in the environment: --grpc-port and GENSERVE_GRPC_PORT."""
    twin = "GENSERVE_" + names[0].removeprefix("--").split("/")[0].upper().replace("-", "_")
    return typer.Option(*names, envvar=twin, help=help, rich_help_panel=panel, **more)


def _grpc(name: str, help: str, *, at_least: int = 0) -> Any:  # noqa: A002
    return _flag(name, help=help, panel=_GRPC, min=at_least, max=2**31 - 1)


def serve(
    model_repository: ModelRepositories = list(_DEFAULTS.model_repository),  # noqa: B006  # typer copies it
    model_control_mode: Annotated[
        Literal["none", "poll", "explicit"],
        _flag(
            "--model-control-mode",
            help="none loads every model at the start; poll also follows changes on disk; explicit loads "
            "what --load-model names, and what the load and unload calls of KServe ask for.",
            panel=_MODELS,
        ),
    ] = "none",
    load_model: Annotated[
        list[str],
        _flag(
            "--load-model",
            help="Load this model at the start, not all; may be given again. * is all of them.",
            panel=_MODELS,
        ),
    ] = list(_DEFAULTS.load_model),  # noqa: B006  # typer copies it
    repository_poll_secs: Annotated[
        float,
        _flag(
            "--repository-poll-secs",
            help="How often poll looks at the disk, seconds.",
            panel=_MODELS,
            min=0.1,
        ),
    ] = _DEFAULTS.repository_poll_s,
    exit_on_error: Annotated[
        bool,
        _flag(
            "--exit-on-error/--no-exit-on-error",
            help="End if a model cannot be loaded at the start; else serve the others.",
            panel=_MODELS,
        ),
    ] = _DEFAULTS.exit_on_error,
    strict_readiness: Annotated[
        bool,
        _flag(
            "--strict-readiness/--no-strict-readiness",
            help="Be ready only while every model is; else as soon as all were tried.",
            panel=_MODELS,
        ),
    ] = _DEFAULTS.strict_readiness,
    strict_model_config: Annotated[
        bool,
        _flag(
            "--disable-auto-complete-config/--no-disable-auto-complete-config",
            "--strict-model-config/--no-strict-model-config",
            help="Take config.pbtxt as it is; else what it leaves out is read from the model's file.",
            panel=_MODELS,
        ),
    ] = _DEFAULTS.strict_model_config,
    strict_placement: Annotated[
        bool,
        _flag(
            "--strict-placement/--no-strict-placement",
            help="Refuse a model for a GPU where there is none; else it runs on the CPU, with a warning.",
            panel=_MODELS,
        ),
    ] = _DEFAULTS.strict_placement,
    strict_repository_paths: Annotated[
        bool,
        _flag(
            "--strict-repository-paths/--no-strict-repository-paths",
            help="Refuse a model if a link in its folder leads out of the repository; else it is followed.",
            panel=_MODELS,
        ),
    ] = _DEFAULTS.strict_repository_paths,
    model_config_name: Annotated[
        str,
        _flag(
            "--model-config-name",
            help="Read configs/NAME.pbtxt in place of config.pbtxt, where a model has it.",
            panel=_MODELS,
        ),
    ] = _DEFAULTS.model_config_name,
    backend_directory: Annotated[
        Path | None,
        _flag(
            "--backend-directory",
            help="Folder with backends in Python, each NAME/model.py.",
            panel=_MODELS,
        ),
    ] = _DEFAULTS.backend_directory,
    backend_config: Annotated[
        list[str],
        _flag(
            "--backend-config",
            help="BACKEND,SETTING=VALUE, or SETTING=VALUE for all backends, such as "
            "onnxruntime,default-max-batch-size=8; may be given again.",
            panel=_MODELS,
        ),
    ] = list(_DEFAULTS.backend_config),  # noqa: B006  # typer copies it
    model_load_thread_count: Annotated[
        int,
        _flag(
            "--model-load-thread-count",
            help="Models that load at once when the server starts.",
            panel=_MODELS,
            min=1,
        ),
    ] = _DEFAULTS.load_threads,
    cache_config: Annotated[
        str,
        _flag(
            "--cache-config",
            help="local,size=BYTES: keep answers of models whose config enables response_cache.",
            panel=_MODELS,
        ),
    ] = "",
    response_cache_byte_size: Annotated[
        int,
        _flag(
            "--response-cache-byte-size", help="The same as --cache-config local,size=.", panel=_MODELS, min=0
        ),
    ] = _DEFAULTS.cache_bytes,
    rate_limit: Annotated[
        Literal["off", "execution_count"],
        _flag(
            "--rate-limit",
            help="execution_count: an instance runs only while it holds its group's resources.",
            panel=_MODELS,
        ),
    ] = "off",
    rate_limit_resource: Annotated[
        list[str],
        _flag(
            "--rate-limit-resource",
            help="NAME:COUNT or NAME:COUNT:DEVICE, how much there is; may be given again.",
            panel=_MODELS,
        ),
    ] = list(_DEFAULTS.rate_limit_resources),  # noqa: B006  # typer copies it
    max_queue: Annotated[
        int,
        _flag("--max-queue", help="Requests that may wait, per generation model.", panel=_MODELS, min=0),
    ] = _DEFAULTS.max_queue,
    max_queue_tokens: Annotated[
        int | None,
        _flag(
            "--max-queue-tokens",
            help="Tokens of the prompts that may wait, per generation model; 0: any number. By default 4 "
            "times what the KV cache holds.",
            panel=_MODELS,
            min=0,
            show_default=False,
        ),
    ] = _DEFAULTS.max_queue_tokens,
    max_queue_wait_s: Annotated[
        float,
        _flag(
            "--max-queue-wait-s",
            help="Seconds a request may wait for its first step; 0 means no limit. A request that has waited "
            "longer, or is expected to, is refused with status 429.",
            panel=_MODELS,
            min=0,
        ),
    ] = _DEFAULTS.max_queue_wait_s,
    host: Annotated[
        str,
        _flag(
            "--host",
            "--http-address",
            help="Address to listen on; 0.0.0.0 lets other machines in.",
            panel=_PLACE,
        ),
    ] = _DEFAULTS.host,
    http_port: Annotated[
        int, _flag("--http-port", help="0 takes a free port.", panel=_PLACE, **_PORTS)
    ] = _DEFAULTS.http_port,
    reuse_http_port: Annotated[
        bool,
        _flag(
            "--reuse-http-port/--no-reuse-http-port",
            help="Share the port with other servers that say so too; the system spreads connections.",
            panel=_PLACE,
        ),
    ] = _DEFAULTS.reuse_http_port,
    allow_grpc: Annotated[
        bool, _flag("--allow-grpc/--no-allow-grpc", help="Serve KServe v2 over gRPC, too.", panel=_PLACE)
    ] = _DEFAULTS.allow_grpc,
    grpc_address: Annotated[
        str, _flag("--grpc-address", help="Another address for gRPC than --host.", panel=_PLACE)
    ] = _DEFAULTS.grpc_host,
    grpc_port: Annotated[
        int, _flag("--grpc-port", help="0 takes a free port.", panel=_PLACE, **_PORTS)
    ] = _DEFAULTS.grpc_port,
    reuse_grpc_port: Annotated[
        bool,
        _flag("--reuse-grpc-port/--no-reuse-grpc-port", help="The same for the port of gRPC.", panel=_PLACE),
    ] = _DEFAULTS.reuse_grpc_port,
    grpc_infer_response_compression_level: Annotated[
        Literal["none", "low", "medium", "high"],
        _flag(
            "--grpc-infer-response-compression-level",
            help="How far responses are compressed for clients that can read that.",
            panel=_GRPC,
        ),
    ] = "none",
    grpc_keepalive_time: Annotated[
        int | None, _grpc("--grpc-keepalive-time", "Between two pings of a connection, ms.", at_least=1)
    ] = None,
    grpc_keepalive_timeout: Annotated[
        int | None,
        _grpc("--grpc-keepalive-timeout", "A ping unanswered for so long closes it, ms.", at_least=1),
    ] = None,
    grpc_keepalive_permit_without_calls: Annotated[
        bool,
        _flag(
            "--grpc-keepalive-permit-without-calls/--no-grpc-keepalive-permit-without-calls",
            help="Send pings between calls, too.",
            panel=_GRPC,
        ),
    ] = False,
    grpc_http2_max_pings_without_data: Annotated[
        int | None,
        _grpc("--grpc-http2-max-pings-without-data", "Pings sent while there is no data; 0: any number."),
    ] = None,
    grpc_http2_min_recv_ping_interval_without_data: Annotated[
        int | None,
        _grpc(
            "--grpc-http2-min-recv-ping-interval-without-data",
            "Pings of a client that come faster while there is no data are bad, ms.",
        ),
    ] = None,
    grpc_http2_max_ping_strikes: Annotated[
        int | None,
        _grpc("--grpc-http2-max-ping-strikes", "Bad pings that close a connection; 0: any number is fine."),
    ] = None,
    grpc_max_connection_age: Annotated[
        int | None, _grpc("--grpc-max-connection-age", "A connection is closed after this, ms.", at_least=1)
    ] = None,
    grpc_max_connection_age_grace: Annotated[
        int | None,
        _grpc("--grpc-max-connection-age-grace", "Calls that run may end in this time after that, ms."),
    ] = None,
    allow_metrics: Annotated[
        bool,
        _flag(
            "--allow-metrics/--no-allow-metrics",
            help="Serve /metrics on a port of its own; it is on the HTTP port in any case.",
            panel=_PLACE,
        ),
    ] = _DEFAULTS.allow_metrics,
    metrics_address: Annotated[
        str, _flag("--metrics-address", help="Another address for metrics than --host.", panel=_PLACE)
    ] = _DEFAULTS.metrics_host,
    metrics_port: Annotated[
        int, _flag("--metrics-port", help="0 takes a free port.", panel=_PLACE, **_PORTS)
    ] = _DEFAULTS.metrics_port,
    trace_config: Annotated[
        list[str],
        _flag(
            "--trace-config",
            help="triton,file=PATH, level=TIMESTAMPS, level=TENSORS, rate=N, count=N or "
            "triton,log-frequency=N: record every Nth KServe request; may be given again.",
            panel=_CLIENTS,
        ),
    ] = list(_DEFAULTS.trace_config),  # noqa: B006  # typer copies it
    metrics_config: Annotated[
        list[str],
        _flag(
            "--metrics-config",
            help="counter_latencies=false or histogram_latencies=true: which latencies /metrics tells; "
            "may be given again.",
            panel=_CLIENTS,
        ),
    ] = list(_DEFAULTS.metrics_config),  # noqa: B006  # typer copies it
    allow_cpu_metrics: Annotated[
        bool,
        _flag(
            "--allow-cpu-metrics/--no-allow-cpu-metrics",
            help="Tell of the machine's processors and memory in /metrics.",
            panel=_CLIENTS,
        ),
    ] = _DEFAULTS.allow_cpu_metrics,
    metrics_interval_ms: Annotated[
        float,
        _flag(
            "--metrics-interval-ms",
            help="The least time over which the use of processors is measured, milliseconds.",
            panel=_CLIENTS,
            min=0,
        ),
    ] = _DEFAULTS.metrics_interval_s * 1000,
    server_id: Annotated[
        str, _flag("--id", help="The server's name in the metadata of KServe.", panel=_CLIENTS)
    ] = _DEFAULTS.server_id,
    allowed_host: Annotated[
        list[str],
        _flag(
            "--allowed-host",
            help="Answer to this host name too, beside localhost and IP addresses; may be given again. "
            "*.example.com takes all names below it, * every name.",
            panel=_ACCESS,
        ),
    ] = list(_DEFAULTS.allowed_hosts),  # noqa: B006  # typer copies it
    allowed_origin: Annotated[
        list[str],
        _flag(
            "--allowed-origin",
            help="Let web pages of this origin call the server (CORS), such as https://example.com; may be "
            "given again. * lets all.",
            panel=_ACCESS,
        ),
    ] = list(_DEFAULTS.allowed_origins),  # noqa: B006  # typer copies it
    allow_unauthenticated: Annotated[
        bool,
        _flag(
            "--allow-unauthenticated/--no-allow-unauthenticated",
            help="Listen on addresses that other machines reach, without an API key.",
            panel=_ACCESS,
        ),
    ] = _DEFAULTS.allow_unauthenticated,
    allow_unauthenticated_metrics: Annotated[
        bool,
        _flag(
            "--allow-unauthenticated-metrics/--no-allow-unauthenticated-metrics",
            help="Ask for no API key on the metrics port.",
            panel=_ACCESS,
        ),
    ] = _DEFAULTS.allow_unauthenticated_metrics,
    allow_uploaded_code: Annotated[
        bool,
        _flag(
            "--allow-uploaded-code/--no-allow-uploaded-code",
            help="Let load calls bring files that run as code in the server: model.py, TorchScript.",
            panel=_ACCESS,
        ),
    ] = _DEFAULTS.allow_uploaded_code,
    ssl_certfile: Annotated[
        Path | None,
        _flag(
            "--ssl-certfile",
            help="PEM file with the server's certificate; all ports speak TLS then.",
            panel=_ACCESS,
        ),
    ] = _DEFAULTS.ssl_certfile,
    ssl_keyfile: Annotated[
        Path | None,
        _flag("--ssl-keyfile", help="PEM file with its key, if not in the same file.", panel=_ACCESS),
    ] = _DEFAULTS.ssl_keyfile,
    ssl_ca_certs: Annotated[
        Path | None,
        _flag(
            "--ssl-ca-certs",
            help="PEM file with certificates: clients must show one that these have signed.",
            panel=_ACCESS,
        ),
    ] = _DEFAULTS.ssl_ca_certs,
    allow_client_shm: Annotated[
        bool,
        _flag(
            "--allow-client-shm/--no-allow-client-shm",
            help="Let clients on this machine pass tensors in shared memory; they are trusted with it.",
            panel=_CLIENTS,
        ),
    ] = _DEFAULTS.allow_client_shm,
    http_restricted_api: Annotated[
        list[str],
        _flag(
            "--http-restricted-api",
            help="PART,PART:HEADER=VALUE: answer these parts of the protocol only with this header; may be "
            "given again. Parts: health, metadata, inference, shared-memory, model-config, model-repository, "
            "statistics, trace, logging.",
            panel=_ACCESS,
        ),
    ] = list(_DEFAULTS.http_restricted_api),  # noqa: B006  # typer copies it
    grpc_restricted_protocol: Annotated[
        list[str],
        _flag(
            "--grpc-restricted-protocol",
            help="The same for gRPC, with the metadata triton-grpc-protocol-HEADER.",
            panel=_ACCESS,
        ),
    ] = list(_DEFAULTS.grpc_restricted_protocol),  # noqa: B006  # typer copies it
    http_header_forward_pattern: Annotated[
        str,
        _flag(
            "--http-header-forward-pattern",
            help="Regular expression: headers in whose name it is found reach models as parameters.",
            panel=_CLIENTS,
        ),
    ] = _DEFAULTS.http_header_forward_pattern,
    grpc_header_forward_pattern: Annotated[
        str,
        _flag("--grpc-header-forward-pattern", help="The same for metadata of gRPC.", panel=_CLIENTS),
    ] = _DEFAULTS.grpc_header_forward_pattern,
    http_max_input_size: Annotated[
        int,
        _flag(
            "--http-max-input-size", help="Of the JSON of one KServe request, bytes.", panel=_CLIENTS, min=1
        ),
    ] = _DEFAULTS.http_max_input_size,
    drain_s: Annotated[
        float,
        _flag(
            "--drain-s",
            "--exit-timeout-secs",
            help="Time for answers to end after SIGTERM, and for requests to a model before it is unloaded.",
            panel=_CLIENTS,
            min=0,
        ),
    ] = _DEFAULTS.drain_s,
    log_verbose: Annotated[
        int,
        _flag(
            "--log-verbose",
            help="1 also logs inferences, health checks, the reasons for refusals, and what models log as "
            "verbose.",
            panel=_LOG,
            min=0,
        ),
    ] = _DEFAULTS.log_verbose,
    log_info: Annotated[
        bool, _flag("--log-info/--no-log-info", help="Log requests, loads and unloads.", panel=_LOG)
    ] = _DEFAULTS.log_info,
    log_warning: Annotated[
        bool,
        _flag(
            "--log-warning/--no-log-warning",
            help="Log warnings, and requests that are refused or fail.",
            panel=_LOG,
        ),
    ] = _DEFAULTS.log_warning,
    log_error: Annotated[
        bool, _flag("--log-error/--no-log-error", help="Log errors.", panel=_LOG)
    ] = _DEFAULTS.log_error,
    log_format: Annotated[
        Literal["default", "ISO8601"],
        _flag("--log-format", help="ISO8601 writes universal time.", panel=_LOG),
    ] = "default",
    log_file: Annotated[
        Path | None,
        _flag("--log-file", help="Append the log to this file, not to stderr.", panel=_LOG),
    ] = _DEFAULTS.log_file,
) -> None:
    """Serve the models of a repository over HTTP and gRPC.

    Flags have tritonserver's names where they mean the same; switches may be written --switch=false.
    Set GENSERVE_API_KEY to ask clients for a key; addresses that other machines reach need one.
    """
    # What is imported stays: 86,000 objects. To look through them for garbage takes a twentieth of the start,
    # and holds up every answer for 0.1 s at each full collection later, such as that after an unload.
    gc.disable()
    from genserve.server import serve as run_server

    gc.freeze()
    gc.enable()
    # Requests leave hardly any circles; looking for them after every 700 objects costs 7 % of an inference.
    gc.set_threshold(10_000, 10, 10)

    settings = ServerSettings(
        model_repository=tuple(model_repository),
        model_control_mode=model_control_mode,
        load_model=tuple(load_model),
        repository_poll_s=repository_poll_secs,
        exit_on_error=exit_on_error,
        strict_readiness=strict_readiness,
        strict_model_config=strict_model_config,
        strict_placement=strict_placement,
        strict_repository_paths=strict_repository_paths,
        model_config_name=model_config_name,
        backend_directory=backend_directory,
        backend_config=tuple(backend_config),
        load_threads=model_load_thread_count,
        cache_bytes=_cache_bytes(cache_config) or response_cache_byte_size,
        rate_limit=rate_limit != "off",
        rate_limit_resources=tuple(rate_limit_resource),
        max_queue=max_queue,
        max_queue_tokens=max_queue_tokens,
        max_queue_wait_s=max_queue_wait_s,
        host=host,
        http_port=http_port,
        reuse_http_port=reuse_http_port,
        allow_grpc=allow_grpc,
        grpc_host=grpc_address,
        grpc_port=grpc_port,
        reuse_grpc_port=reuse_grpc_port,
        grpc_channel_arguments=_given(
            {
                "grpc.default_compression_level": (
                    _COMPRESSION_LEVELS.index(grpc_infer_response_compression_level) or None
                ),
                "grpc.keepalive_time_ms": grpc_keepalive_time,
                "grpc.keepalive_timeout_ms": grpc_keepalive_timeout,
                "grpc.keepalive_permit_without_calls": int(grpc_keepalive_permit_without_calls) or None,
                "grpc.http2.max_pings_without_data": grpc_http2_max_pings_without_data,
                "grpc.http2.min_ping_interval_without_data_ms": (
                    grpc_http2_min_recv_ping_interval_without_data
                ),
                "grpc.http2.max_ping_strikes": grpc_http2_max_ping_strikes,
                "grpc.max_connection_age_ms": grpc_max_connection_age,
                "grpc.max_connection_age_grace_ms": grpc_max_connection_age_grace,
            }
        ),
        allow_metrics=allow_metrics,
        metrics_host=metrics_address,
        metrics_port=metrics_port,
        trace_config=tuple(trace_config),
        metrics_config=tuple(metrics_config),
        allow_cpu_metrics=allow_cpu_metrics,
        metrics_interval_s=metrics_interval_ms / 1000,
        server_id=server_id,
        api_key=os.environ.get("GENSERVE_API_KEY") or None,
        allowed_hosts=tuple(allowed_host),
        allowed_origins=tuple(allowed_origin),
        allow_unauthenticated=allow_unauthenticated,
        allow_unauthenticated_metrics=allow_unauthenticated_metrics,
        allow_uploaded_code=allow_uploaded_code,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        ssl_ca_certs=ssl_ca_certs,
        http_restricted_api=tuple(http_restricted_api),
        grpc_restricted_protocol=tuple(grpc_restricted_protocol),
        allow_client_shm=allow_client_shm,
        http_header_forward_pattern=_pattern(http_header_forward_pattern),
        grpc_header_forward_pattern=_pattern(grpc_header_forward_pattern),
        http_max_input_size=http_max_input_size,
        drain_s=drain_s,
        log_file=log_file,
        log_format=log_format,
        log_info=log_info,
        log_warning=log_warning,
        log_error=log_error,
        log_verbose=log_verbose,
    )
    run_server(settings, on_ready=print_startup_banner, on_stuck=_cut_off)


def _given(arguments: dict[str, int | None]) -> tuple[tuple[str, int], ...]:
    return tuple((name, value) for name, value in arguments.items() if value is not None)


def _cut_off() -> None:
    # Not `sys.exit`: a model that does not return would keep the process as it has kept the server.
    os._exit(1)


def _cache_bytes(text: str) -> int:
    """Return the bytes that `local,size=BYTES` says; 0 for an empty text."""
    if not text:
        return 0
    kind, _, size = text.partition(",size=")
    if kind != "local" or not size.isdecimal():
        raise typer.BadParameter(
            f"{text!r} is not local,size=BYTES, the only cache there is", param_hint="--cache-config"
        )
    return int(size)


def _pattern(text: str) -> str:
    """Return a regular expression that compiles."""
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(
            f"{text!r} is no regular expression: {error}", param_hint="--...-header-forward-pattern"
        ) from error
    return text


def print_startup_banner(server: ServerInfo) -> None:
    """Print what is served, where, and what to try first."""
    from genserve.cli.console import print_error

    if server.versions:
        _print_table(server.versions)
    for model in server.models:
        print(
            f"{model.name}: {model.precision}, {model.max_length} tokens of context, "
            f"{model.max_num_seqs} answers at once, KV cache up to {model.kv_cache_bytes / 2**20:,.0f} MiB"
        )
    for error in server.errors:
        print_error(error)
    routes = "chat: /v1/chat/completions, generate: /generate, API: /docs" if server.models else "API: /docs"
    print(f"\nReady at {server.url} ({routes})")
    if server.grpc_address:
        print(f"KServe v2 at {server.url}/v2, over gRPC at {server.grpc_address}")
    if server.metrics_url:
        print(f"Metrics at {server.metrics_url}")
    print(flush=True)
    if server.models:
        _print_first_steps(server)


def _print_table(versions: tuple[VersionInfo, ...]) -> None:
    from rich.table import Table

    from genserve.cli.console import make_console, visible

    table = Table("Model", "Version", "Status")
    for line in versions:
        status = f"{line.state}: {line.reason.strip()}" if line.reason else line.state or "not loaded"
        table.add_row(visible(line.name), "" if line.version is None else str(line.version), visible(status))
    make_console().print(table, soft_wrap=False)


def _print_first_steps(server: ServerInfo) -> None:
    body = {
        "model": server.models[0].name,
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "stream": True,
    }
    print(f"  genserve chat --url {server.url}")
    print(f"  curl -N {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    print(f"    -d '{json.dumps(body)}'\n", flush=True)
