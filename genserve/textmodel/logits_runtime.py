"""Logits runtime: which class runs a logits stage, by its config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Protocol, TypedDict

from genserve.backends.backend import Placement, bytes_parameter, integer_parameter, model_file
from genserve.backends.onnxruntime import open_graph
from genserve.backends.pytorch import open_module, set_threads
from genserve.config.model_config import ModelConfig
from genserve.generation.logits_model import LogitsModel
from genserve.repository.index import ModelEntry
from genserve.textmodel.runtimes.growing_logits import GrowingLogits
from genserve.textmodel.runtimes.kv_cache_memory import HostMemory, LogitsMemory
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from genserve.textmodel.runtimes.torchscript_logits import TorchLogits
from genserve.textmodel.runtimes.uncached_logits import Run, UncachedLogits

__all__ = [
    "ON_CPU",
    "CacheKind",
    "LoadedLogits",
    "cache_kind",
    "context_length",
    "is_logits_stage",
    "load_logits",
    "logits_file",
]


logger = logging.getLogger(__name__)

_FILES = {"onnxruntime": "model.onnx", "pytorch": "model.pt"}
ON_CPU = Placement(name="cpu", kind="CPU")
_DEFAULT_LENGTH = 1024  # tokens; a graph without a cache does not say how many it can take


class LoadedLogits(LogitsModel, Protocol):
    """A logits model, and what a person is told of it."""

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes that the cache takes at the most; 0: it has none."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """What its export wrote into the file: `genserve.precision` and others."""


class CacheKind(Enum):
    """Where a logits stage keeps the keys and values of its tokens, by the states of its config."""

    IN_PLACE = auto()   # written where it lies
    GROWING = auto()    # a traced graph's: copied at each step, with one token more
    NONE = auto()       # no states: every step computes all tokens again


def is_logits_stage(entry: ModelEntry) -> bool:
    """Whether a model is an exported logits graph: its states are a KV cache."""
    config = entry.config
    return config is not None and config.backend in _FILES and cache_kind(config) is not CacheKind.NONE


def load_logits(entry: ModelEntry, *, placement: Placement = ON_CPU) -> LoadedLogits:
    """Load the latest version of a logits stage, whose config has no error, onto the device of a placement.

    Raises:
        RepositoryError: its file cannot be loaded, or does not fit the config.
        MissingDependency: the runtime that its config names is not installed.
    """
    config, path = entry.config, logits_file(entry)
    assert config is not None  # or it would have an error
    if cache_kind(config) is CacheKind.NONE:
        return _whole(path, config, placement)
    if cache_kind(config) is CacheKind.GROWING:
        return _growing(path, config, placement)
    memory = _memory(placement)
    sizes = _sizes(config)
    if config.backend == "pytorch":
        set_threads(config.parameters)
        return TorchLogits(path, memory=memory, **sizes)
    num_threads = integer_parameter(config.parameters, "intra_op_thread_count", default=0)
    return OnnxLogits(path, num_threads=num_threads, memory=memory, **sizes)


def logits_file(entry: ModelEntry) -> Path:
    """Return the file of the latest version of a logits stage, whose config has no error.

    Raises:
        RepositoryError: it is not there.
    """
    assert entry.config is not None  # or it would have an error
    return model_file(
        entry.latest_version(),
        filename=entry.config.default_model_filename,
        default=_FILES[entry.config.backend],
        model=entry.name,
    )


class _Sizes(TypedDict):
    max_num_seqs: int
    max_length: int                 # 0: as long as the graph can
    kv_cache_bytes: int | None      # None: half of what is free


def context_length(config: ModelConfig) -> int:
    """Return how many tokens the config of a logits stage gives a sequence; 0: that is up to the graph."""
    stated = integer_parameter(config.parameters, "max_sequence_length", default=0)
    return stated or (_DEFAULT_LENGTH if cache_kind(config) is CacheKind.NONE else 0)


def _sizes(config: ModelConfig) -> _Sizes:
    return _Sizes(
        max_num_seqs=max(1, config.max_batch_size),
        max_length=context_length(config),
        kv_cache_bytes=bytes_parameter(config.parameters, "kv_cache_bytes"),
    )


def _memory(placement: Placement) -> LogitsMemory:
    if placement.kind != "GPU":
        return HostMemory()
    from genserve.textmodel.runtimes.device_memory import (
        DeviceMemory,  # it imports torch, which takes seconds
    )

    return DeviceMemory(f"cuda:{placement.device_id}")


def cache_kind(config: ModelConfig) -> CacheKind:
    """Return where the logits stage of a config has its cache."""
    batching = config.sequence_batching
    if batching is None or not batching.iterative or not batching.states:
        return CacheKind.NONE
    # Others have iterative sequences with states too, which are no cache of keys and values.
    if not all(state.input_name.startswith("past_key_values") for state in batching.states):
        return CacheKind.NONE
    if all(state.same_buffer for state in batching.states):
        return CacheKind.IN_PLACE
    return CacheKind.GROWING if config.backend == "onnxruntime" else CacheKind.NONE


def _growing(path: Path, config: ModelConfig, placement: Placement) -> LoadedLogits:
    logger.warning(
        "model %s has a KV cache that is copied at each step: it is slower than a graph of a family "
        "that `genserve export` knows",
        config.name,
    )
    return GrowingLogits(
        path,
        parameters=config.parameters,
        providers=_memory(placement).providers,
        **_sizes(config),
    )


def _whole(path: Path, config: ModelConfig, placement: Placement) -> LoadedLogits:
    run: Run
    if config.backend == "pytorch":
        run = open_module(path, config=config, placement=placement).run
    else:
        run = open_graph(path, config=config, placement=placement).run
    max_length = context_length(config)
    logger.warning(
        "model %s has no KV cache: each token costs a run of the whole sequence, of %d tokens at the most "
        "(max_sequence_length); `genserve export` of its checkpoint makes one with a cache",
        config.name,
        max_length,
    )
    return UncachedLogits(run, config, max_length=max_length)
