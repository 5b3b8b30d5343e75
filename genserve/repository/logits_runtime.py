"""Logits runtime: which class runs a logits stage, by what its config says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from genserve.backends.logits_onnx import OnnxLogits
from genserve.backends.parameters import integer_parameter
from genserve.generation.logits_model import LogitsModel
from genserve.repository.index import ModelEntry

__all__ = ["LoadedLogits", "is_logits_stage", "load_logits"]


class LoadedLogits(LogitsModel, Protocol):
    """A logits model, and what a person is told of it."""

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the whole cache, if every slot is used to its end; 0: it has none."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """What its export wrote into the file: `genserve.precision` and others."""


def is_logits_stage(entry: ModelEntry) -> bool:
    """Whether a model is an exported logits graph: its states are a KV cache that is written in place."""
    config = entry.config
    if config is None or config.backend != "onnxruntime" or config.sequence_batching is None:
        return False
    states = config.sequence_batching.states
    return config.sequence_batching.iterative and bool(states) and all(state.same_buffer for state in states)


def load_logits(entry: ModelEntry) -> LoadedLogits:
    """Load the latest version of a logits stage, whose config has no error.

    Raises:
        RepositoryError: its file cannot be loaded, or does not fit the config.
        MissingDependency: the runtime that its config names is not installed.
    """
    config = entry.config
    assert config is not None  # or it would have an error
    return OnnxLogits(
        entry.latest_version() / (config.default_model_filename or "model.onnx"),
        num_slots=max(1, config.max_batch_size),
        max_length=integer_parameter(config.parameters, "max_sequence_length", default=0),
        num_threads=integer_parameter(config.parameters, "intra_op_thread_count", default=0),
    )
