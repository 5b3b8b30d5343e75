"""Text model loader: from the folders of the three stages to a running text model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from genserve.backends.backend import Placement, boolean_parameter
from genserve.backends.row_picker import sample_rows
from genserve.backends.warmup import run_warmups, warmup_batches
from genserve.config.normalise import normalise, num_gpus
from genserve.config.schema import model_config
from genserve.errors import InferenceError, RepositoryError, Status
from genserve.generation.admission_control import QueueLimits
from genserve.generation.engine import Engine
from genserve.generation.engine_request import TokenSequence
from genserve.generation.engine_thread import EngineThread
from genserve.generation.output_processor import DecodeFunction
from genserve.generation.speculation import DraftModel, PromptLookup, Speculation
from genserve.generation_metrics import Metrics
from genserve.inference import Inference
from genserve.inference_statistics import ModelStatistics
from genserve.repository.ensemble_steps import Chain, generation_stages
from genserve.repository.index import ModelEntry
from genserve.repository.loading import output_labels
from genserve.repository.model_validation import accept, model_diagnostics
from genserve.repository.model_versions import ModelRuntime, ModelVersion
from genserve.repository.options import RepositoryOptions
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.decoder_stage import load_decoding
from genserve.textmodel.logits_config import LogitsNames
from genserve.textmodel.logits_inference import LogitsStage
from genserve.textmodel.logits_placement import logits_placement
from genserve.textmodel.logits_runtime import ON_CPU, CacheKind, LoadedLogits, cache_kind, load_logits
from genserve.textmodel.text_inference import TextGeneration
from genserve.textmodel.text_model import TextModel

__all__ = ["load_drafting", "load_generation", "load_logits_stage"]


def load_drafting(
    entry: ModelEntry,
    logits: LoadedLogits,
    entries: Mapping[str, ModelEntry],
    *,
    tokenizer: Tokenizer,
    placement: Placement,
) -> Speculation | None:
    """Load what a logits stage, whose config has no error, asks for; None if there are to be no drafts.

    Where it says nothing, tokens are looked up in the prompt and the answer if a forward of several tokens
    of a sequence costs little more than one: that of an ONNX graph over a cache in place, on the CPU.

    Args:
        entry: the stage.
        logits: as it was loaded.
        entries: all models, of which one may draft.
        tokenizer: of the stage's ensemble.
        placement: where the stage runs.

    Raises:
        RepositoryError: what is to draft cannot be loaded, or has another vocabulary.
    """
    config = entry.config
    assert config is not None  # or it would have an error
    pays = (
        config.backend == "onnxruntime"
        and cache_kind(config) is CacheKind.IN_PLACE
        and placement.kind != "GPU"
    )
    name, method = (config.parameters.get(key) for key in ("draft_model", "speculation"))
    if method == "none":
        return None
    if name is not None:
        return Speculation(_draft_model(name, logits, entries, tokenizer=tokenizer))
    return Speculation(PromptLookup()) if method == "prompt_lookup" or pays else None


def _draft_model(
    name: str, logits: LoadedLogits, entries: Mapping[str, ModelEntry], *, tokenizer: Tokenizer
) -> DraftModel:
    """Load the logits stage of an ensemble once more, to draft on the CPU."""
    stages = generation_stages(entries[name], entries)
    assert stages is not None  # or the logits stage's config would have an error
    accept(diagnostic for stage in stages.values() for diagnostic in model_diagnostics(stage, entries))
    if not tokenizer.has_vocabulary_of(Tokenizer.from_folder(stages["tokenizer"].latest_version())):
        raise RepositoryError(
            f"draft_model {name!r} has another vocabulary: its token ids mean other words",
            remedy="take a smaller model of the same family, whose tokenizer.json is the same",
        )
    return DraftModel(load_logits(stages["logits"]), vocab_size=logits.vocab_size)


# Prompts of so many full KV caches may wait by default.
_CACHES_IN_QUEUE = 4


def load_logits_stage(entry: ModelEntry, *, options: RepositoryOptions, metrics: Metrics) -> ModelVersion:
    """Load a logits stage that no ensemble has, with an engine of its own.

    Raises:
        RepositoryError: it has an error, or cannot be loaded.
        MissingDependency: ONNX Runtime is not installed.
    """
    started_s = time.monotonic()
    accept(model_diagnostics(entry, {entry.name: entry}))
    placement = logits_placement(entry, strict_placement=options.strict_placement)
    names, logits = _logits_names(entry), load_logits(entry, placement=placement)
    _warm_up(logits, entry, placement=placement)
    engine = _start(logits, decode=_nothing, entry=entry, stage=entry, options=options, metrics=metrics)
    statistics = ModelStatistics()
    runner = LogitsStage(
        engine,
        names=names,
        vocab_size=logits.vocab_size,
        max_length=logits.max_length,
        statistics=statistics,
        close=engine.close,
    )
    load_s = time.monotonic() - started_s
    return _served(entry, runner, statistics, load_s=load_s, options=options, placement=placement)


def load_generation(
    entry: ModelEntry,
    stages: Chain,
    entries: Mapping[str, ModelEntry],
    *,
    options: RepositoryOptions,
    metrics: Metrics,
) -> list[ModelVersion]:
    """Load the three stages of an ensemble and start its engine.

    Returns:
        The ensemble, and the stages that its engine runs.

    Raises:
        RepositoryError: the ensemble or a stage has an error, is missing, or cannot be loaded.
        MissingDependency: ONNX Runtime is not installed.
    """
    started_s = time.monotonic()
    models = (entry, *stages.values())
    accept(each for model in models for each in model_diagnostics(model, entries))
    names = _logits_names(stages["logits"])
    placement = logits_placement(stages["logits"], strict_placement=options.strict_placement)
    ensemble = _ensemble(entry, stages, entries, placement=placement, options=options, metrics=metrics)
    load_s = time.monotonic() - started_s
    of_text, of_logits = ModelStatistics(), ModelStatistics()
    generation = TextGeneration(ensemble, statistics=of_text, names=_text_names(entry, stages))
    logits = LogitsStage(
        ensemble.engine,
        names=names,
        vocab_size=ensemble.vocab_size,
        max_length=ensemble.max_length,
        statistics=of_logits,
    )
    return [
        _served(entry, generation, of_text, load_s=load_s, options=options),
        _served(stages["logits"], logits, of_logits, load_s=load_s, options=options, placement=placement),
        _served(stages["decoder"], _Inside(ensemble), ModelStatistics(), load_s=load_s, options=options),
    ]


async def _nothing(sequence: TokenSequence) -> None:
    """The decoding loop of an engine that only answers with logits."""


def _text_names(entry: ModelEntry, stages: Chain) -> dict[str, str]:
    """Return how the tokenizer and the decoder stage call the tensors of their ensemble, by its names."""
    assert entry.config is not None  # or it would have an error
    steps = {step.model_name: step for step in entry.config.ensemble_steps}
    tokenizer, decoder = (steps[stages[stage].name] for stage in ("tokenizer", "decoder"))
    maps = (decoder.input_map, tokenizer.input_map, decoder.output_map)
    return {tensor: name for each in maps for name, tensor in each.items()}


def _logits_names(entry: ModelEntry) -> LogitsNames:
    assert entry.config is not None  # or it would have an error
    return LogitsNames.of(entry.config)


class _Inside:
    """A decoder stage, which is a loop inside of its ensemble's engine; a `ModelRuntime`."""

    def __init__(self, ensemble: TextModel) -> None:
        self._ensemble = ensemble

    @property
    def ready(self) -> bool:
        return self._ensemble.engine.alive

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
    entry: ModelEntry,
    stages: Chain,
    entries: Mapping[str, ModelEntry],
    *,
    placement: Placement,
    options: RepositoryOptions,
    metrics: Metrics,
) -> TextModel:
    with ExitStack() as undo:
        tokenizer = Tokenizer.from_folder(stages["tokenizer"].latest_version())
        undo.callback(tokenizer.close)      # an error refers to it, and is kept
        decoder = stages["decoder"]
        assert decoder.config is not None  # or it would have an error
        file = decoder.latest_version() / decoder.config.default_model_filename
        decoding = load_decoding(file, name=decoder.name)
        logits = load_logits(stages["logits"], placement=placement)
        _warm_up(logits, stages["logits"], placement=placement)
        engine = _start(
            logits,
            decode=decoding.decode,
            entry=entry,
            stage=stages["logits"],
            options=options,
            metrics=metrics,
            speculation=load_drafting(
                stages["logits"], logits, entries, tokenizer=tokenizer, placement=placement
            ),
        )
        undo.pop_all()
    return TextModel(
        name=entry.name,
        tokenizer=tokenizer,
        engine=engine,
        plugins=decoding.plugins,
        max_length=logits.max_length,
        max_num_seqs=logits.max_num_seqs,
        vocab_size=logits.vocab_size,
        kv_cache_bytes=logits.kv_cache_bytes,
        precision=logits.metadata.get("genserve.precision", "unknown"),
        loaded_s=time.time(),
    )


def _warm_up(logits: LoadedLogits, entry: ModelEntry, *, placement: Placement) -> None:
    """Run the samples of a logits stage's `model_warmup` through an engine, each time one of its own.

    So neither the metrics nor the statistics count them, and no request goes on behind what they leave in the
    KV cache.

    Raises:
        RepositoryError: a sample cannot be read, or was answered with an error.
    """
    assert entry.config is not None  # or it would have an error
    for batch in warmup_batches(entry.config, entry.path):
        for _ in range(batch.count):
            engine = EngineThread(
                Engine(logits, decode=_nothing, prefix_cache=False),
                name=f"warmup-{entry.name}",
                max_num_seqs=logits.max_num_seqs,
                limits=QueueLimits(max_requests=len(batch.requests)),
                metrics=Metrics().for_model(entry.name),
            )
            statistics = ModelStatistics()
            stage = LogitsStage(
                engine,
                names=_logits_names(entry),
                vocab_size=logits.vocab_size,
                max_length=logits.max_length,
                statistics=statistics,
                close=engine.close,
            )
            options = RepositoryOptions()  # of metrics that nobody reads
            served = _served(entry, stage, statistics, load_s=0.0, options=options, placement=placement)
            try:
                run_warmups(partial(_submit, served), [replace(batch, count=1)])
            finally:
                served.close(timeout_s=0)


def _submit(served: ModelVersion, inferences: Sequence[Inference]) -> None:
    for inference in inferences:
        served.submit(inference)


def _start(
    logits: LoadedLogits,
    *,
    decode: DecodeFunction,
    entry: ModelEntry,
    stage: ModelEntry,
    options: RepositoryOptions,
    metrics: Metrics,
    speculation: Speculation | None = None,
) -> EngineThread:
    """Start the engine of a model, `entry`, whose logits stage is `stage`."""
    assert stage.config is not None  # or it would have an error
    prefix_cache = boolean_parameter(stage.config.parameters, "prefix_cache", default=True)
    return EngineThread(
        Engine(
            logits,
            decode=decode,
            picker=sample_rows,
            prefix_cache=prefix_cache and logits.kv_cache_bytes > 0,
            speculation=speculation,
        ),
        name=entry.name,
        max_num_seqs=logits.max_num_seqs,
        limits=_queue_limits(options, num_cache_tokens=logits.num_blocks * logits.block_size),
        metrics=metrics.for_model(entry.name),
    )


def _queue_limits(options: RepositoryOptions, *, num_cache_tokens: int) -> QueueLimits:
    max_tokens = options.max_queue_tokens
    if max_tokens is None:
        max_tokens = _CACHES_IN_QUEUE * num_cache_tokens
    return QueueLimits(
        max_requests=options.max_queue,
        max_tokens=max_tokens or None,
        max_wait_s=options.max_queue_wait_s or None,
    )


def _served(
    entry: ModelEntry,
    runner: ModelRuntime,
    statistics: ModelStatistics,
    *,
    load_s: float,
    options: RepositoryOptions,
    placement: Placement = ON_CPU,
) -> ModelVersion:
    """Serve by the version of a model that its policy and its step name; an ensemble needs no folder."""
    message = type(entry.parsed.message)()
    message.CopyFrom(entry.parsed.message)
    normalise(message, model_folder=entry.path, gpus=num_gpus() if placement.kind == "GPU" else 0)
    config = model_config(message, name=entry.name)
    return ModelVersion(
        runner,
        config=config,
        version=int(entry.latest_version().name) if entry.versions else 1,
        statistics=statistics,
        labels=output_labels(config, entry.path),
        load_s=load_s,
        histogram_latencies=options.histogram_latencies,
    )
