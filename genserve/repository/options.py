"""Options: settings of a repository; frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from genserve.batching.rate_limiter import ResourceCapacity
from genserve.config.backends import DEFAULT_MAX_BATCH_SIZE
from genserve.engine.admission_control import QueueLimits
from genserve.engine.disk_cache import PrefixCacheFolder
from genserve.sampling.defaults import default_sampling_params
from genserve.text.tokenizer_files import recommended_sampling_params

# By default, prompts that would fill the KV cache this many times may wait.
_CACHES_IN_QUEUE = 4


class ControlMode(StrEnum):
    """How models are loaded and unloaded; Triton's names."""

    NONE = "none"               # all at the start, none later
    POLL = "poll"               # all, and again when their folders change
    EXPLICIT = "explicit"       # on request: at the start, and by load and unload requests
    ON_DEMAND = "on-demand"     # by the requests that need them, as far as memory allows; not Triton's


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryOptions:
    """Settings of a repository."""

    control_mode: ControlMode = ControlMode.NONE
    poll_s: float = 15.0
    strict_config: bool = False             # configs are not completed from the model's files
    strict_placement: bool = False          # KIND_GPU without a GPU is an error
    renumber_gpus: bool = False             # see `config.normalise.renumber_gpus`
    strict_paths: bool = False              # a link out of the repository is an error
    config_name: str = ""                   # `configs/NAME.pbtxt` replaces config.pbtxt where it exists
    backend_directory: Path | None = None   # its folders are backends written in Python
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE    # see `Backend.auto_complete`
    cache_bytes: int = 0                    # the size of the response cache; 0: no cache
    load_threads: int = 4                   # models that load in parallel at the start
    exit_timeout_s: float = 30.0            # how long an unload waits for requests, and for the model's code
    max_queue: int = 256                    # per text model: requests that may wait for their first step
    max_queue_tokens: int | None = 0        # the tokens of their prompts; None: 4 full KV caches; 0: any
    max_queue_wait_s: float = 0.0           # longest wait for the first step; 0: unlimited
    max_model_len: int | None = None        # the context of text models; None: see `CachedLogits`
    prefix_cache_folder: PrefixCacheFolder | None = None    # of text models; None: in memory alone
    generation_config: bool = True          # a model's generation_config.json has defaults for sampling
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)     # in place of its values
    verifies_recordings: bool = True        # as far as configs ask for it, see `require_same_answers`
    histogram_latencies: bool = False       # measure the time to the first response
    rate_limiter: bool = False              # instances acquire the resources of their groups
    resources: tuple[ResourceCapacity, ...] = ()    # the rate limiter's; empty: the most of one instance
    memory_budget_bytes: int | None = None  # what models that are loaded on demand may take; None: any
    keep_alive_s: float = 300.0             # how long such a model stays loaded after its last use

    @property
    def kv_cache_bytes(self) -> int | None:
        """The size of a KV cache that its config does not limit; None: half of the free memory.

        Of a memory budget it is an eighth, so that several models fit.
        """
        return None if self.memory_budget_bytes is None else self.memory_budget_bytes // 8

    def queue_limits(self, num_cache_tokens: int) -> QueueLimits:
        """Return the limits of the queue of a text model whose KV cache holds `num_cache_tokens`."""
        max_tokens = self.max_queue_tokens
        if max_tokens is None:
            max_tokens = _CACHES_IN_QUEUE * num_cache_tokens
        return QueueLimits(
            max_requests=self.max_queue,
            max_tokens=max_tokens or None,
            max_wait_s=self.max_queue_wait_s or None,
        )

    def default_sampling_params(self, folder: Path) -> Mapping[str, Any]:
        """Return the default sampling parameters of the model whose tokenizer is in `folder`.

        Raises:
            RepositoryError: generation_config.json is broken, or a value is out of range.
            InvalidRequest: a value of `override_generation_config` is out of range.
        """
        recommended = recommended_sampling_params(folder) if self.generation_config else {}
        return recommended | default_sampling_params(self.override_generation_config)
