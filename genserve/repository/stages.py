"""Stages: from the folders of a generation ensemble to a running one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from genserve.backends.generation_ensemble import GenerationEnsemble
from genserve.backends.logits_onnx import OnnxLogits
from genserve.backends.python.decoding import load_decode
from genserve.config.fault import first_error
from genserve.config.from_message import model_config
from genserve.config.model_config import ModelConfig
from genserve.config.normalise import normalise
from genserve.errors import InferenceError, Status
from genserve.generation.decoding_loops import DecodeFunction
from genserve.generation.engine import Engine
from genserve.generation.loop import EngineLoop
from genserve.generation.token_sequence import TokenSequence
from genserve.inference import Inference
from genserve.metrics import Metrics
from genserve.repository.check import model_faults
from genserve.repository.index import ModelEntry
from genserve.repository.logits_stage import LogitsStage
from genserve.repository.served import Runner, Served
from genserve.repository.text_generation import TextGeneration
from genserve.repository.wiring import generation_stages
from genserve.statistics import ModelStatistics
from genserve.text.tokenizer import Tokenizer

__all__ = [
    "generation_names",
    "is_logits_stage",
    "load_generation",
    "load_logits_stage",
    "owned_stages",
    "stage_owners",
]

logger = logging.getLogger(__name__)


def generation_names(entries: Mapping[str, ModelEntry]) -> list[str]:
    """Return the ensembles that chain a tokenizer, a logits and a decoder stage."""
    return [name for name, entry in entries.items() if generation_stages(entry, entries)]


def stage_owners(entries: Mapping[str, ModelEntry]) -> dict[str, str]:
    """Return, by name of a logits or decoder stage, the ensemble whose engine runs it."""
    owners: dict[str, str] = {}
    for name in generation_names(entries):
        stages = generation_stages(entries[name], entries) or {}
        for stage in ("logits", "decoder"):
            owners.setdefault(stages[stage].name, name)
    return owners


def owned_stages(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> list[ModelEntry]:
    """Return the stages that are loaded with an ensemble; of any other model, none."""
    return list((generation_stages(entry, entries) or {}).values())


def is_logits_stage(entry: ModelEntry) -> bool:
    """Whether a model is an exported logits graph: its states are a KV cache that is written in place."""
    config = entry.config
    if config is None or config.backend != "onnxruntime" or config.sequence_batching is None:
        return False
    states = config.sequence_batching.states
    return config.sequence_batching.iterative and bool(states) and all(state.same_buffer for state in states)


def load_logits_stage(entry: ModelEntry, *, max_queue: int, metrics: Metrics) -> Served:
    """Load a logits stage that no ensemble has, with an engine of its own.

    Raises:
        RepositoryError: it has an error, or cannot be loaded.
        MissingDependency: ONNX Runtime is not installed.
    """
    started_s = time.monotonic()
    _check([entry], {entry.name: entry})
    logits = _load_logits(entry)
    loop = _start(logits, decode=_nothing, name=entry.name, max_queue=max_queue, metrics=metrics)
    statistics = ModelStatistics()
    runner = LogitsStage(
        loop,
        vocab_size=logits.vocab_size,
        max_length=logits.max_length,
        statistics=statistics,
        close=loop.close,
    )
    return _served(entry, runner, statistics, load_s=time.monotonic() - started_s)


def load_generation(
    entry: ModelEntry, entries: Mapping[str, ModelEntry], *, max_queue: int, metrics: Metrics
) -> list[Served]:
    """Load the three stages of an ensemble and start its engine.

    Returns:
        The ensemble, and the stages that its engine runs.

    Raises:
        RepositoryError: the ensemble or a stage has an error, is missing, or cannot be loaded.
        MissingDependency: ONNX Runtime is not installed.
    """
    started_s = time.monotonic()
    stages = generation_stages(entry, entries)
    assert stages is not None
    _check([entry, *stages.values()], entries)
    ensemble = _ensemble(entry, stages, max_queue=max_queue, metrics=metrics)
    load_s = time.monotonic() - started_s
    of_text, of_logits = ModelStatistics(), ModelStatistics()
    generation = TextGeneration(ensemble, statistics=of_text)
    logits = LogitsStage(
        ensemble.loop,
        vocab_size=ensemble.vocab_size,
        max_length=ensemble.max_length,
        statistics=of_logits,
    )
    return [
        _served(entry, generation, of_text, load_s=load_s),
        _served(stages["logits"], logits, of_logits, load_s=load_s),
        _served(stages["decoder"], _Inside(ensemble), ModelStatistics(), load_s=load_s),
    ]


def _check(models: Iterable[ModelEntry], entries: Mapping[str, ModelEntry]) -> None:
    """Raise the first error of the models; log their warnings."""
    faults = [fault for model in models for fault in model_faults(model, entries)]
    error = first_error(faults)
    if error is not None:
        raise error
    for fault in faults:
        logger.warning("%s: %s (%s)", fault.where, fault.message, fault.remedy)


async def _nothing(sequence: TokenSequence) -> None:
    """The decoding loop of an engine that only answers with logits."""


class _Inside:
    """A decoder stage, which is a loop inside of its ensemble's engine; a `Runner`."""

    def __init__(self, ensemble: GenerationEnsemble) -> None:
        self._ensemble = ensemble

    @property
    def ready(self) -> bool:
        return self._ensemble.loop.alive

    @property
    def num_waiting(self) -> int:
        return 0

    def submit(self, inference: Inference) -> None:
        raise InferenceError(
            f"model '{inference.model_name}' runs inside of the ensemble '{self._ensemble.name}'",
            status=Status.UNSUPPORTED,
            remedy=f"ask '{self._ensemble.name}'",
        )

    def close(self) -> None:
        """Nothing is held."""


def _ensemble(
    entry: ModelEntry, stages: Mapping[str, ModelEntry], *, max_queue: int, metrics: Metrics
) -> GenerationEnsemble:
    tokenizer = Tokenizer.from_folder(stages["tokenizer"].latest_version())
    decoder = stages["decoder"]
    decode = load_decode(decoder.latest_version() / "model.py", name=decoder.name)
    logits = _load_logits(stages["logits"])
    loop = _start(logits, decode=decode, name=entry.name, max_queue=max_queue, metrics=metrics)
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


def _start(
    logits: OnnxLogits, *, decode: DecodeFunction, name: str, max_queue: int, metrics: Metrics
) -> EngineLoop:
    return EngineLoop(
        Engine(logits, decode=decode),
        name=name,
        num_slots=logits.num_slots,
        max_waiting=max_queue,
        metrics=metrics.for_model(name),
    )


def _served(entry: ModelEntry, runner: Runner, statistics: ModelStatistics, *, load_s: float) -> Served:
    """Serve by the highest version of a model; an ensemble needs no version folder."""
    message = type(entry.parsed.message)()
    message.CopyFrom(entry.parsed.message)
    normalise(message, model_folder=entry.path)
    config = model_config(message, name=entry.name)
    version = (entry.versions or (1,))[-1]
    return Served(runner, config=config, version=version, statistics=statistics, load_s=load_s)


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
