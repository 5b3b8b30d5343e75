"""Settings: what a server is told at its start; frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ServerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of one server; `genserve serve` fills them from flags and GENSERVE_* variables."""

    # What is served.
    model_repository: tuple[Path, ...] = (Path("model_repository"),)
    model_control_mode: str = "none"        # "none", "poll" or "explicit"
    load_model: tuple[str, ...] = ()        # empty: all, or with control mode "explicit" none; "*": all
    repository_poll_s: float = 15.0         # between two looks at the repository, with control mode "poll"
    exit_on_error: bool = True              # a model that fails to load at the start ends the server
    strict_readiness: bool = True           # ready only while every model is
    strict_model_config: bool = False       # nothing is completed from the files of models
    strict_placement: bool = False          # a model for a GPU is not run on the CPU
    strict_repository_paths: bool = False   # a model with a link that leads out of the repository is refused
    model_config_name: str = ""             # configs/NAME.pbtxt of a model in place of its config.pbtxt
    backend_directory: Path | None = None   # of backends in Python
    backend_config: tuple[str, ...] = ()    # "BACKEND,SETTING=VALUE", or "SETTING=VALUE" for all backends
    load_threads: int = 4                   # models that load at the same time
    cache_bytes: int = 0                    # of the response cache; 0: there is none
    rate_limit: bool = False                # instances share the resources that their groups name
    rate_limit_resources: tuple[str, ...] = ()      # "NAME:COUNT" or "NAME:COUNT:DEVICE"
    max_queue: int = 256                    # requests that may wait for their first step, per model
    max_queue_tokens: int | None = None     # of their prompts; None: 4 times what the KV cache holds; 0: any
    max_queue_wait_s: float = 10.0          # that a request may wait for its first step; 0: for ever

    # Where.
    host: str = "127.0.0.1"
    http_port: int = 8000                   # 0: a free one; so for the other ports
    reuse_http_port: bool = False           # other servers that say so too may listen on the same port
    allow_grpc: bool = True
    grpc_host: str = ""                     # empty: `host`
    grpc_port: int = 8001
    reuse_grpc_port: bool = False
    grpc_channel_arguments: tuple[tuple[str, int], ...] = ()    # of gRPC: ("grpc.keepalive_time_ms", 1000)
    allow_metrics: bool = True              # a port for metrics alone; they are on the HTTP port in any case
    metrics_host: str = ""                  # empty: `host`
    metrics_port: int = 8002

    # What is told of it.
    trace_config: tuple[str, ...] = ()      # "SETTING=VALUE" or "MODE,SETTING=VALUE"
    metrics_config: tuple[str, ...] = ()    # "SETTING=VALUE"
    allow_cpu_metrics: bool = True
    metrics_interval_s: float = 2.0         # over which the use of the processors is measured, at the least

    # To whom, and how much.
    server_id: str = "genserve"             # what the KServe protocols call the server
    api_key: str | None = None              # printable ASCII; None: open to whoever reaches the port
    allow_unauthenticated: bool = False     # listen where other machines reach a port, without a key
    allow_unauthenticated_metrics: bool = False     # the metrics port asks for no key
    allowed_hosts: tuple[str, ...] = ()     # host names of the server beside localhost; "*.example.com", "*"
    allowed_origins: tuple[str, ...] = ()   # of web pages that may call: "https://example.com", "*"
    allow_uploaded_code: bool = False       # files that a load call brings may run code in the server
    ssl_certfile: Path | None = None        # PEM; with it all ports speak TLS alone
    ssl_keyfile: Path | None = None         # PEM; None: the key is in `ssl_certfile`
    ssl_ca_certs: Path | None = None        # PEM; clients need a certificate that one of these has signed
    http_restricted_api: tuple[str, ...] = ()       # "PART,PART:HEADER=VALUE": parts that ask for a header
    grpc_restricted_protocol: tuple[str, ...] = ()  # the same for gRPC; the header has a prefix of Triton's
    allow_client_shm: bool = False          # whether clients may register regions of shared memory
    http_header_forward_pattern: str = ""   # headers that models get as parameters; empty: none
    grpc_header_forward_pattern: str = ""   # metadata that models get as parameters; empty: none
    http_max_input_size: int = 64 * 2**20   # of the JSON of one KServe request, bytes
    max_body_bytes: int = 8 * 2**20         # of one request; to check it stalls the event loop, 20 ms per MB
    drain_s: float = 30.0                   # how long answers may go on after SIGTERM

    # The log; by all but the file it may be changed while the server runs.
    log_file: Path | None = None            # None: stderr
    log_format: str = "default"             # or "ISO8601"
    log_info: bool = True                   # lines of this class; so for the next two
    log_warning: bool = True
    log_error: bool = True
    log_verbose: int = 0                    # above 0 also what is of no class: inferences, verbose models
