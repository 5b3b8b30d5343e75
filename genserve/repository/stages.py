"""Stages: from the folders of an ensemble to a running one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from genserve.backends.ensemble import GenerationEnsemble
from genserve.backends.onnxruntime import OnnxLogits
from genserve.backends.python.decoding import load_decode
from genserve.config.fault import first_error
from genserve.config.model_config import ModelConfig
from genserve.generation.engine import Engine
from genserve.generation.loop import EngineLoop
from genserve.metrics import Metrics
from genserve.repository.check import model_faults
from genserve.repository.index import ModelEntry
from genserve.repository.wiring import STAGE_BACKENDS, step_models
from genserve.text.tokenizer import Tokenizer

__all__ = ["StageEntries", "find_stages", "load_ensemble"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEntries:
    """The three models that a generation ensemble chains."""

    tokenizer: ModelEntry
    logits: ModelEntry
    decoder: ModelEntry


def find_stages(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> StageEntries:
    """Find the stages that an ensemble's steps name; its warnings and theirs are logged.

    Raises:
        RepositoryError: the ensemble or one of its stages has an error; the first of them.
    """
    models = [entry, *step_models(entry, entries)]
    faults = [fault for model in models for fault in model_faults(model, entries)]
    error = first_error(faults)
    if error is not None:
        raise error
    for fault in faults:
        logger.warning("%s: %s (%s)", fault.where, fault.message, fault.remedy)
    by_backend = {_config(model).backend: model for model in models}
    return StageEntries(**{stage: by_backend[backend] for stage, backend in STAGE_BACKENDS.items()})


def load_ensemble(
    entry: ModelEntry, entries: Mapping[str, ModelEntry], *, max_queue: int, metrics: Metrics
) -> GenerationEnsemble:
    """Load the three stages of an ensemble and start its engine.

    Raises:
        RepositoryError: a stage is missing or cannot be loaded.
        MissingDependency: ONNX Runtime is not installed.
    """
    stages = find_stages(entry, entries)
    tokenizer = Tokenizer.from_folder(stages.tokenizer.latest_version())
    decode = load_decode(stages.decoder.latest_version() / "model.py", name=stages.decoder.name)
    logits = _load_logits(stages.logits)
    loop = EngineLoop(
        Engine(logits, decode=decode),
        name=entry.name,
        num_slots=logits.num_slots,
        max_waiting=max_queue,
        metrics=metrics.for_model(entry.name),
    )
    return GenerationEnsemble(
        name=entry.name,
        tokenizer=tokenizer,
        loop=loop,
        max_length=logits.max_length,
        num_slots=logits.num_slots,
        vocab_size=logits.vocab_size,
        kv_cache_bytes=logits.kv_cache_bytes,
        precision=logits.metadata.get("genserve.precision", "unknown"),
        loaded_s=time.time(),
    )


def _load_logits(entry: ModelEntry) -> OnnxLogits:
    config = _config(entry)
    return OnnxLogits(
        entry.latest_version() / (config.default_model_filename or "model.onnx"),
        num_slots=max(1, config.max_batch_size),
        max_length=_int_parameter(config, "max_sequence_length"),
        num_threads=_int_parameter(config, "intra_op_thread_count"),
    )


def _config(entry: ModelEntry) -> ModelConfig:
    assert entry.config is not None  # or it would have an error
    return entry.config


def _int_parameter(config: ModelConfig, name: str) -> int | None:
    return int(config.parameters[name]) if name in config.parameters else None
