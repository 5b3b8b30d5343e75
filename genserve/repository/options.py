"""Options: how a repository is loaded and kept; frozen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from genserve.config.backends import DEFAULT_MAX_BATCH_SIZE
from genserve.schedulers.rate_limiter import ResourceCapacity

__all__ = ["ControlMode", "RepositoryOptions"]


class ControlMode(StrEnum):
    """Who decides what is loaded; Triton's words."""

    NONE = "none"               # everything at the start, nothing after
    POLL = "poll"               # everything, and again what changes on disk
    EXPLICIT = "explicit"       # what is asked for, at the start and by the load and unload calls


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryOptions:
    """What a server is told about its repository."""

    control_mode: ControlMode = ControlMode.NONE
    poll_s: float = 15.0
    strict_config: bool = False             # nothing is completed from the model's files
    strict_placement: bool = False          # KIND_GPU without a GPU is an error
    strict_paths: bool = False              # a link that leads out of the repository is an error
    config_name: str = ""                   # `configs/NAME.pbtxt` of a model is read where it exists
    backend_directory: Path | None = None   # of python-based backends
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE    # see `Backend.auto_complete`
    cache_bytes: int = 0                    # of the response cache; 0: there is none
    load_threads: int = 4                   # models that load at the same time
    exit_timeout_s: float = 30.0            # an unload waits so long for requests, and for the code
    max_queue: int = 256                    # requests that may wait for their first step, per model
    max_queue_tokens: int | None = 0        # of their prompts; None: 4 times what the KV cache holds; 0: any
    max_queue_wait_s: float = 0.0           # that a request may wait for its first step; 0: for ever
    histogram_latencies: bool = False       # the time to the first response is measured
    rate_limiter: bool = False  # instances share the resources that their groups name
    resources: tuple[
        ResourceCapacity, ...
    ] = ()  # of the rate limiter; empty: what one instance needs at most
