"""Stages: from the folders of an ensemble to a running one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from genserve.backends.ensemble import GenerationEnsemble
from genserve.backends.onnxruntime import OnnxLogits
from genserve.backends.python import load_decode
from genserve.config.model_config import ModelConfig
from genserve.errors import ConfigError, RepositoryError
from genserve.generation.engine import Engine
from genserve.generation.loop import EngineLoop
from genserve.metrics import Metrics
from genserve.repository.index import ModelEntry
from genserve.text.tokenizer import Tokenizer

__all__ = ["StageEntries", "find_stages", "load_ensemble"]

# Which backend makes which stage.
_STAGE_BACKENDS = {"tokenizer": "tokenizer", "logits": "onnxruntime", "decoder": "python"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEntries:
    """The three models that a generation ensemble chains."""

    tokenizer: ModelEntry
    logits: ModelEntry
    decoder: ModelEntry


def find_stages(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> StageEntries:
    """Find the stages that an ensemble's steps name.

    Raises:
        RepositoryError: a step's model is missing or broken, or the steps are not one tokenizer,
            one logits and one decoder stage.
    """
    config = _config(entry)
    by_backend: dict[str, ModelEntry] = {}
    for step in config.ensemble_steps:
        stage = entries.get(step.model_name)
        if stage is None:
            raise RepositoryError(
                f"ensemble {entry.name!r} has a step {step.model_name!r}, and the repository no such model",
                remedy=f"models there: {', '.join(entries)}",
            )
        by_backend[_config(stage).backend] = stage
    if set(by_backend) != set(_STAGE_BACKENDS.values()) or len(config.ensemble_steps) != len(_STAGE_BACKENDS):
        found = ", ".join(f"{s.model_name}" for s in config.ensemble_steps)
        raise RepositoryError(
            f"ensemble {entry.name!r} is not a chain of a tokenizer, a logits and a decoder stage: {found}",
            remedy="give it three steps whose backends are 'tokenizer', 'onnxruntime' and 'python'",
        )
    return StageEntries(**{stage: by_backend[backend] for stage, backend in _STAGE_BACKENDS.items()})


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
    path = entry.latest_version() / (config.default_model_filename or "model.onnx")
    if not path.exists():
        raise RepositoryError(
            f"{path} is missing",
            remedy="its weights are not here: `genserve pull` or `genserve export` brings them",
        )
    return OnnxLogits(
        path,
        num_slots=max(1, config.max_batch_size),
        max_length=_int_parameter(config, "max_sequence_length", path=entry.path),
        num_threads=_int_parameter(config, "intra_op_thread_count", path=entry.path),
    )


def _config(entry: ModelEntry) -> ModelConfig:
    if entry.config is None:
        assert entry.error is not None
        raise entry.error
    return entry.config


def _int_parameter(config: ModelConfig, name: str, *, path: Path) -> int | None:
    text = config.parameters.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{path / 'config.pbtxt'}: parameter {name!r} is {text!r}", remedy="write a whole number above 0"
        )
    return int(text)
