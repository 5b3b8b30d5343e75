"""Server settings: the settings of a server, each with its default and its flag of `genserve serve`.

To add a setting, add a row here; the command line reads the rows.
"""
# ruff: noqa: FBT003, RUF009  # in a row the default comes first; the calls make fields

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from genserve.machine import byte_size
from genserve.store import default_repository

# The headings of `genserve serve --help`.
_MODELS, _PORTS, _GRPC, _ACCESS, _CLIENTS, _LOG = (
    "Models", "Ports", "Connections of gRPC", "Access", "Clients", "Log",
)  # fmt: skip
_MULTIPLES = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"\d{1,12}(?:\.\d{0,9})?", re.ASCII)
_DURATION_PART = re.compile(r"(\d{1,12}(?:\.\d{0,9})?)(ns|us|µs|ms|s|m|h)", re.ASCII)     # as Go writes them
_DURATION = re.compile(f"(?:{_DURATION_PART.pattern})+", re.ASCII)
_COMPRESSION_LEVELS = ("none", "low", "medium", "high")     # gRPC numbers them in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag or an argument of the command line, which sets a field of a dataclass.

    Attributes:
        help: the explanation in `--help`.
        heading: the heading in `--help`; empty: Options.
        names: all spellings; empty: the name of the field.
        variable: the environment variable that sets the flag too, in which * stands for the name of the flag;
            empty: none.
        metavar: the value in `--help`; empty: its type.
        minimum: the least value of a number.
        maximum: the greatest value of a number.
        is_argument: whether the field is a positional argument.
        takes_several: whether several values may follow one flag: `--goodput ttft:500 tpot:50`.
        show_default: whether `--help` shows the default.
        validate: raises ValueError for a value that is not allowed.
        complete: returns the values that a shell offers, with an explanation each; called with the word that
            is being typed, and with the values on the line as attributes of `parsed_args`.
        grpc_argument: the argument of gRPC channels that the setting becomes.
    """

    help: str
    heading: str = ""
    names: tuple[str, ...] = ()
    variable: str = ""
    metavar: str = ""
    minimum: float | None = None
    maximum: float | None = None
    is_argument: bool = False
    takes_several: bool = False
    show_default: bool = True
    validate: Callable[[Any], object] | None = None
    complete: Callable[..., Mapping[str, str]] | None = None
    grpc_argument: str = ""


def flag(default: Any, flag: Flag, *, repr: bool = True) -> Any:  # noqa: A002  # as `field`
    """Return a field of a dataclass that a flag sets; MISSING: the flag is required."""
    made: Any = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, repr=repr, metadata={"flag": flag})


def _flag(
    default: Any,
    heading: str,
    help: str,  # noqa: A002  # as argparse
    *names: str,
    is_secret: bool = False,
    **more: Any,
) -> Any:
    made = Flag(help=help, heading=heading, names=names, variable="GENSERVE_*", **more)
    return flag(default, made, repr=not is_secret)


def _port(default: int) -> Any:
    return _flag(default, _PORTS, "0 takes a free port.", minimum=0, maximum=65535)


def _grpc(argument: str, help: str, *, minimum: int = 0) -> Any:  # noqa: A002
    return _flag(None, _GRPC, help, minimum=minimum, maximum=2**31 - 1, grpc_argument=argument)


def _cache_config_bytes(text: str) -> int:
    """Return the bytes of `local,size=BYTES`; 0 for an empty text. Raises ValueError for any other."""
    if not text:
        return 0
    kind, _, size = text.partition(",size=")
    if kind != "local" or not size.isdecimal():
        raise ValueError(f"{text!r} is not local,size=BYTES, the only supported cache")
    return int(size)


def read_max_model_len(value: str | int) -> int | None:
    """Return the tokens that `--max-model-len` means, in vLLM's notation; None: `auto` or -1.

    `k` and `m` are thousands and millions (25.6k), `K` and `M` powers of 1024.

    Raises:
        ValueError: it is something else, or less than 2, since a prompt and an answer need one token each.
    """
    text = str(value).strip()
    if text in ("auto", "-1"):
        return None
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12}(?=[km]))?)([kKmM]?)", text, re.ASCII)
    number = int(Decimal(match[1]) * _MULTIPLES[match[2]]) if match else 0
    if number < 2:
        raise ValueError(f"{text!r} is not auto, or a number of tokens such as 32768, 32k or 32K")
    return number


def read_memory_budget(text: str) -> int | None:
    """Return the bytes of `--model-memory-budget`; None: `auto`. Raises ValueError for any other text."""
    if text == "auto":
        return None
    size = byte_size(text)
    if not size:
        raise ValueError(f"{text!r} is not auto, or an amount of memory such as 16GiB")
    return size


def read_keep_alive(value: str | float) -> float:
    """Return the seconds of a time in Ollama's notation: `5m`, `1h30m`, 300.

    Infinite for a negative time, and for more centuries than a thread can wait.

    Raises:
        ValueError: it is something else.
    """
    text = str(value).strip()
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    if _NUMBER.fullmatch(digits):
        seconds = float(digits)
    elif _DURATION.fullmatch(digits):
        seconds = sum(float(count) * _SECONDS[unit] for count, unit in _DURATION_PART.findall(digits))
    else:
        raise ValueError(f"{text!r} is not a time such as 5m, 1h30m or 300 (seconds)")
    return math.inf if sign * seconds < 0 or seconds >= threading.TIMEOUT_MAX else seconds


def _json_object(text: str) -> dict[str, Any]:
    """Return a JSON object; an empty one for an empty text. Raises ValueError for any other."""
    value = json.loads(text or "{}")
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")  # noqa: TRY004  # as json.loads
    return value


def _compile(pattern: str) -> None:
    try:
        re.compile(pattern.removeprefix("(?-i)"))    # a switch of RE2, which header_pattern reads
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error


# Each class has the settings under one heading of `--help`. They have no slots, since a class can inherit
# fields with slots from one base only.


@dataclass(frozen=True, kw_only=True)
class _ModelSettings:
    """The repository, how models are loaded, and the queues of text models."""

    model_repository: tuple[Path, ...] = _flag(
        lambda: (default_repository(),), _MODELS,
        "Folder of models; repeatable. Default: the store in GENSERVE_HOME.",
        "--model-repository", "--model-store",
    )  # fmt: skip
    model_control_mode: Literal["none", "poll", "explicit", "on-demand"] = _flag(
        "none", _MODELS,
        "none loads every model at the start; poll also follows changes on disk; explicit loads the models "
        "of --load-model, and then those of KServe's load and unload calls; on-demand loads a model when a "
        "request needs it, and unloads it when it is idle or another one needs its memory.",
    )
    load_model: tuple[str, ...] = _flag(
        (), _MODELS,
        "Load this model at the start instead of all; repeatable. * means all. With on-demand it stays.",
    )
    model_memory_budget: str = _flag(
        "auto", _MODELS,
        "The memory of all models that are loaded on-demand together, with their KV caches, such as 16GiB; "
        "auto: four fifths of the memory that is free at the start.",
        metavar="SIZE", validate=read_memory_budget,
    )
    model_keep_alive: str = _flag(
        "5m", _MODELS,
        "How long a model that was loaded on-demand stays after its last use, unless a request of Ollama's "
        "API says otherwise: 5m, 1h30m, or seconds. 0: it leaves at once; -1: it stays until another model "
        "needs its memory.",
        metavar="TIME", validate=read_keep_alive,
    )
    repository_poll_s: float = _flag(
        15.0, _MODELS,
        "Interval at which poll scans the disk, seconds.", "--repository-poll-secs", minimum=0.1,
    )
    exit_on_error: bool = _flag(
        True, _MODELS, "Exit if a model cannot be loaded at the start; otherwise serve the others."
    )
    strict_readiness: bool = _flag(
        True, _MODELS, "Be ready only while every model is ready; otherwise as soon as all loads have ended."
    )
    strict_model_config: bool = _flag(
        False, _MODELS,
        "Do not complete config.pbtxt with the fields that can be read from the model file.",
        "--disable-auto-complete-config", "--strict-model-config",
    )
    strict_placement: bool = _flag(
        False, _MODELS,
        "Reject a GPU model on a machine without a GPU; otherwise it runs on the CPU, with a warning.",
    )
    strict_repository_paths: bool = _flag(
        False, _MODELS,
        "Reject a model with a link that leads out of the repository; otherwise links are followed.",
    )
    model_config_name: str = _flag(
        "", _MODELS, "Read configs/NAME.pbtxt instead of config.pbtxt, if a model has it."
    )
    backend_directory: Path | None = _flag(None, _MODELS, "Folder of Python backends, each NAME/model.py.")
    backend_config: tuple[str, ...] = _flag(
        (), _MODELS,
        "BACKEND,SETTING=VALUE, or SETTING=VALUE for all backends, such as "
        "onnxruntime,default-max-batch-size=8; repeatable.",
    )
    max_model_len: str | int = _flag(
        "auto", _MODELS,
        "Context length of every text model: the tokens of prompt and answer together, such as 32768, 32k or "
        "32K (1024s). auto: the model's own, as far as its config and the memory of the KV cache allow.",
        metavar="N", validate=read_max_model_len,
    )
    prefix_cache_dir: Path | None = _flag(
        None, _MODELS,
        "Folder in which text models keep their prefix caches, for use after a restart; servers may share "
        "it. Default: none.",
    )
    prefix_cache_disk_byte_size: int = _flag(
        8 * 2**30, _MODELS,
        "Maximum size of that folder, bytes; what was used least recently is deleted.", minimum=2**20,
    )
    generation_config: Literal["auto", "none"] = _flag(
        "auto", _MODELS,
        "auto: sampling parameters that a request leaves out default to those of the model's "
        "generation_config.json; none: only the end-of-sequence tokens of that file are used.",
    )
    override_generation_config: str = _flag(
        "", _MODELS,
        'JSON object that overrides values of generation_config.json, such as {"temperature": 0.6}.',
        validate=_json_object,
    )
    load_threads: int = _flag(
        4, _MODELS,
        "Models that are loaded concurrently at the start.", "--model-load-thread-count", minimum=1,
    )
    cache_config: str = _flag(
        "", _MODELS,
        "local,size=BYTES: cache the responses of models whose config enables response_cache.",
        validate=_cache_config_bytes,
    )
    response_cache_byte_size: int = _flag(0, _MODELS, "Same as --cache-config local,size=.", minimum=0)
    rate_limit: Literal["off", "execution_count"] = _flag(
        "off", _MODELS, "execution_count: an instance runs only while it holds its group's resources."
    )
    rate_limit_resources: tuple[str, ...] = _flag(
        (), _MODELS,
        "Available resources, NAME:COUNT or NAME:COUNT:DEVICE; repeatable.",
        "--rate-limit-resource",
    )
    max_queue: int = _flag(256, _MODELS, "Queue limit in requests, per text model.", minimum=0)
    max_queue_tokens: int | None = _flag(
        None, _MODELS,
        "Queue limit in prompt tokens, per text model; 0: no limit. Default: 4 times the tokens that fit "
        "into the KV cache.",
        minimum=0, show_default=False,
    )
    max_queue_wait_s: float = _flag(
        10.0, _MODELS,
        "Queue limit in seconds until a request's first step; 0: no limit. A request that has waited longer, "
        "or is expected to, is rejected with status 429.",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class _PortSettings:
    """Addresses and ports."""

    host: str = _flag(
        "127.0.0.1", _PORTS,
        "Address to listen on; 0.0.0.0 lets other machines in.",
        "--host", "--http-address",
    )
    http_port: int = _port(8000)
    reuse_http_port: bool = _flag(
        False, _PORTS,
        "Share the port with other servers that set this flag; the system distributes connections.",
    )
    allow_grpc: bool = _flag(True, _PORTS, "Serve KServe v2 over gRPC.")
    grpc_host: str = _flag("", _PORTS, "Address for gRPC, if it differs from --host.", "--grpc-address")
    grpc_port: int = _port(8001)
    reuse_grpc_port: bool = _flag(False, _PORTS,
        "Share the gRPC port with other servers that set this flag; the system distributes connections.",
    )
    allow_metrics: bool = _flag(
        True, _PORTS, "Serve /metrics on a separate port; the HTTP port always has it."
    )
    metrics_host: str = _flag(
        "", _PORTS, "Address for metrics, if it differs from --host.", "--metrics-address"
    )
    metrics_port: int = _port(8002)


@dataclass(frozen=True, kw_only=True)
class _GrpcSettings:
    """The behaviour of gRPC connections."""

    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"] = _flag(
        "none", _GRPC,
        "Compression of responses, for clients that support it.",
        grpc_argument="grpc.default_compression_level",
    )
    grpc_keepalive_time: int | None = _grpc(
        "grpc.keepalive_time_ms", "Interval between pings of a connection, ms.", minimum=1
    )
    grpc_keepalive_timeout: int | None = _grpc(
        "grpc.keepalive_timeout_ms", "Time to wait for the answer to a ping, ms.", minimum=1
    )
    grpc_keepalive_permit_without_calls: bool = _flag(
        False, _GRPC, "Send pings without active calls.", grpc_argument="grpc.keepalive_permit_without_calls"
    )
    grpc_http2_max_pings_without_data: int | None = _grpc(
        "grpc.http2.max_pings_without_data", "Number of pings without data; 0: no limit."
    )
    grpc_http2_min_recv_ping_interval_without_data: int | None = _grpc(
        "grpc.http2.min_ping_interval_without_data_ms",
        "Minimum interval of a client's pings without data, in ms; "
        "pings at shorter intervals count as strikes.",
    )
    grpc_http2_max_ping_strikes: int | None = _grpc(
        "grpc.http2.max_ping_strikes", "Ping strikes that close a connection; 0: no limit."
    )
    grpc_max_connection_age: int | None = _grpc(
        "grpc.max_connection_age_ms", "Maximum age of a connection, ms.", minimum=1
    )
    grpc_max_connection_age_grace: int | None = _grpc(
        "grpc.max_connection_age_grace_ms", "Additional time for active calls at that age, ms."
    )


@dataclass(frozen=True, kw_only=True)
class _ClientSettings:
    """The limits of clients, and the reports about their requests."""

    trace_config: tuple[str, ...] = _flag(
        (), _CLIENTS,
        "triton,file=PATH, level=TIMESTAMPS, level=TENSORS, rate=N, count=N or triton,log-frequency=N: "
        "record every Nth KServe request; repeatable.",
    )
    otlp_traces_endpoint: str = _flag(
        "", _CLIENTS,
        "Send an OpenTelemetry span for each text request to this collector: http://HOST:4317 (gRPC) or "
        "http://HOST:4318/v1/traces (HTTP). Needs the extra 'otel'.",
    )
    metrics_config: tuple[str, ...] = _flag(
        (), _CLIENTS,
        "counter_latencies=false or histogram_latencies=true: kinds of latencies in /metrics; repeatable.",
    )
    allow_cpu_metrics: bool = _flag(True, _CLIENTS, "Report CPU and memory usage of the machine in /metrics.")
    metrics_interval_ms: float = _flag(
        2000.0, _CLIENTS, "Minimum interval over which CPU usage is measured, milliseconds.", minimum=0
    )
    server_id: str = _flag("genserve", _CLIENTS, "The server's name in the metadata of KServe.", "--id")
    allow_client_shm: bool = _flag(
        False, _CLIENTS,
        "Allow clients on this machine to pass tensors in shared memory; they must be trusted.",
    )
    http_header_forward_pattern: str = _flag(
        "", _CLIENTS,
        "Regular expression: headers with a matching name are passed to models as parameters.",
        validate=_compile,
    )
    grpc_header_forward_pattern: str = _flag(
        "", _CLIENTS, "Same for the metadata of gRPC.", validate=_compile
    )
    response_store_byte_size: int = _flag(
        64 * 2**20, _CLIENTS,
        "Maximum size of the responses that /v1/responses stores, bytes; 0: none are stored.", minimum=0,
    )
    http_max_input_size: int = _flag(
        64 * 2**20, _CLIENTS,
        "Maximum size of one KServe request, bytes: its JSON, or its raw or decompressed body.", minimum=1,
    )
    max_connections: int = _flag(
        8192, _CLIENTS,
        "Open connections of HTTP; further ones get status 503, except for probes of health.",
        minimum=1,
    )
    head_timeout_s: float = _flag(
        10.0, _CLIENTS, "Seconds in which the head of an HTTP request must arrive; status 408.", minimum=0.1
    )
    body_timeout_s: float = _flag(
        30.0, _CLIENTS,
        "Seconds in which 1 KiB per second of the body of an HTTP request, or its end, must arrive; "
        "status 408.",
        minimum=0.1,
    )
    read_timeout_s: float = _flag(
        30.0, _CLIENTS,
        "Seconds in which a client must read 1 KiB per second of its waiting answer; otherwise it is "
        "disconnected.",
        minimum=0.1,
    )
    keep_alive_s: float = _flag(
        75.0, _CLIENTS, "Seconds for which an idle connection of HTTP stays open.", minimum=0
    )
    drain_s: float = _flag(
        30.0, _CLIENTS,
        "Seconds for active requests to end after SIGTERM, and before a model is unloaded.",
        "--drain-s", "--exit-timeout-secs", minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class _AccessSettings:
    """Who may connect, and what they may do."""

    allowed_hosts: tuple[str, ...] = _flag(
        (), _ACCESS,
        "Accept requests for this host name, in addition to localhost and IP addresses; repeatable. "
        "*.example.com accepts all subdomains, * every name.",
        "--allowed-host",
    )
    allowed_origins: tuple[str, ...] = _flag(
        (), _ACCESS,
        "Allow web pages of this origin to call the server (CORS), such as https://example.com; repeatable. "
        "* allows all.",
        "--allowed-origin",
    )
    allow_unauthenticated: bool = _flag(
        False, _ACCESS, "Allow addresses that other machines can reach without an API key."
    )
    allow_unauthenticated_metrics: bool = _flag(
        False, _ACCESS, "Do not require the API key on the metrics port."
    )
    allow_uploaded_code: bool = _flag(
        False, _ACCESS,
        "Allow load calls to upload files that run as code in the server: model.py, TorchScript.",
    )
    api_key_file: Path | None = _flag(
        None, _ACCESS,
        "TOML file of named API keys and limits; requests need one of them. Read again when it changes.",
    )
    ssl_certfile: Path | None = _flag(
        None, _ACCESS, "PEM file with the server's certificate; enables TLS on all ports."
    )
    ssl_keyfile: Path | None = _flag(
        None, _ACCESS, "PEM file with the private key, if it is not in the same file."
    )
    ssl_ca_certs: Path | None = _flag(
        None, _ACCESS,
        "PEM file with CA certificates: clients need a certificate that one of these has signed.",
    )
    http_restricted_api: tuple[str, ...] = _flag(
        (), _ACCESS,
        "PART,PART:HEADER=VALUE: require this header for these parts of the protocol; repeatable. "
        "Parts: health, metadata, inference, shared-memory, model-config, model-repository, "
        "statistics, trace, logging.",
        is_secret=True,
    )
    grpc_restricted_protocol: tuple[str, ...] = _flag(
        (), _ACCESS, "Same for gRPC, with the metadata triton-grpc-protocol-HEADER.", is_secret=True
    )


@dataclass(frozen=True, kw_only=True)
class _LogSettings:
    """What is logged."""

    log_verbose: int = _flag(
        0, _LOG,
        "1 also logs inferences, health checks, reasons of rejections, and verbose lines of models.",
        minimum=0,
    )
    log_info: bool = _flag(True, _LOG, "Log requests, loads and unloads.")
    log_warning: bool = _flag(True, _LOG, "Log warnings, and requests that are rejected or fail.")
    log_error: bool = _flag(True, _LOG, "Log errors.")
    log_format: Literal["default", "ISO8601"] = _flag("default", _LOG, "ISO8601 writes times in UTC.")
    log_file: Path | None = _flag(None, _LOG, "Append the log to this file instead of stderr.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(
    _LogSettings, _AccessSettings, _ClientSettings, _GrpcSettings, _PortSettings, _ModelSettings
):
    """The settings of one server; `genserve serve` fills them from flags and GENSERVE_* variables."""

    # The settings below have no flag.
    # Keys in printable ASCII, from GENSERVE_API_KEY and GENSERVE_CONTROL_KEY.
    api_key: str | None = field(default=None, repr=False)
    control_key: str | None = field(default=None, repr=False)   # None: `api_key` controls the server too
    max_body_bytes: int = 8 * 2**20     # the longest body of a request

    @property
    def cache_bytes(self) -> int:
        """Size of the response cache, bytes; 0: no cache."""
        return _cache_config_bytes(self.cache_config) or self.response_cache_byte_size

    @property
    def context_limit(self) -> int | None:
        """The context length that text models must have; None: as long as each can have."""
        return read_max_model_len(self.max_model_len)

    @property
    def overriding_generation_config(self) -> dict[str, Any]:
        """The values that override generation_config.json."""
        return _json_object(self.override_generation_config)


def grpc_channel_arguments(settings: ServerSettings) -> tuple[tuple[str, int], ...]:
    """Return the arguments of the server's gRPC channels, without arguments at gRPC's default."""
    flags = ((setting.name, setting.metadata.get("flag")) for setting in fields(settings))
    values = ((flag.grpc_argument, getattr(settings, name)) for name, flag in flags if flag)
    return tuple(
        (argument, _COMPRESSION_LEVELS.index(value) if isinstance(value, str) else int(value))
        for argument, value in values
        if argument and value not in ("none", None) and value is not False
    )
