"""Settings: what a server is told at its start; frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ServerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of one server; `genserve serve` fills them from flags and GENSERVE_* variables."""

    model_repository: tuple[Path, ...] = (Path("model_repository"),)    # the first that has a model wins
    host: str = "127.0.0.1"
    http_port: int = 8000                   # 0: a free one
    load_model: tuple[str, ...] = ()        # empty: every generation model of the repository
    allow_client_shm: bool = False          # whether clients may register regions of shared memory
    server_id: str = "genserve"             # what the KServe protocols call the server
    grpc_header_forward_pattern: str = ""   # metadata that models get as parameters; empty: none
    api_key: str | None = None              # None: open to whoever reaches the port
    max_queue: int = 256                    # requests that may wait for a slot, per model
    max_body_bytes: int = 8 * 2**20         # of one request; parsing it stalls the event loop 4 ms per MB
    drain_s: float = 30.0                   # how long answers may go on after SIGTERM
    log_verbose: int = 0                    # 0: warnings and lifecycle; 1: also requests
