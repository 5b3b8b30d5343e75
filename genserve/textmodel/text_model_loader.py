"""Text model loader: from the resolved configs of the stages to running engines."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from genserve.backends.backend import Placement, boolean_parameter
from genserve.backends.warmup import run_warmups, warmup_batches
from genserve.config.model_config import ModelConfig
from genserve.errors import RepositoryError
from genserve.generation.admission_control import QueueLimits
from genserve.generation.engine import Engine
from genserve.generation.engine_request import TokenSequence
from genserve.generation.engine_thread import EngineThread
from genserve.generation.output_processor import DecodeFunction
from genserve.generation.speculation import DraftModel, PromptLookup, Speculation
from genserve.generation_metrics import Metrics
from genserve.inference_statistics import ModelStatistics
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.decoder_stage import load_decoding
from genserve.textmodel.input_processor import ModelLimits
from genserve.textmodel.logits_config import CacheKind, cache_kind
from genserve.textmodel.logits_inference import LogitsInference
from genserve.textmodel.logits_runtime import LoadedLogits, load_logits
from genserve.textmodel.text_model import TextModel

__all__ = [
    "DraftSource",
    "QueueOptions",
    "StageSource",
    "TextModelSource",
    "load_logits_stage",
    "load_text_model",
    "looks_up_prompts",
]

# By default, prompts that would fill the KV cache this many times may wait.
_CACHES_IN_QUEUE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSource:
    """One version of a stage: its resolved config and its files."""

    config: ModelConfig
    path: Path          # the folder of the model
    folder: Path        # the folder of the version


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """The stages of another text model, which drafts tokens for this one."""

    name: str
    tokenizer: StageSource
    logits: StageSource


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModelSource:
    """The stages of a text model, and the device of its logits stage."""

    name: str
    tokenizer: StageSource
    logits: StageSource
    decoder: StageSource
    placement: Placement
    draft: DraftSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Bounds of the queue in front of an engine."""

    max_requests: int           # besides the running ones
    max_tokens: int | None      # of the waiting prompts; None: 4 times what the KV cache holds; 0: no bound
    max_wait_s: float           # for the first step; 0: no bound

    def limits(self, *, num_cache_tokens: int) -> QueueLimits:
        """Return the limits for an engine whose KV cache holds `num_cache_tokens`."""
        max_tokens = self.max_tokens
        if max_tokens is None:
            max_tokens = _CACHES_IN_QUEUE * num_cache_tokens
        return QueueLimits(
            max_requests=self.max_requests,
            max_tokens=max_tokens or None,
            max_wait_s=self.max_wait_s or None,
        )


def load_text_model(source: TextModelSource, *, queue: QueueOptions, metrics: Metrics) -> TextModel:
    """Load the three stages of a text model and start its engine.

    Raises:
        RepositoryError: a stage cannot be loaded, or the draft model has another vocabulary.
        MissingDependency: the runtime of the logits stage is not installed.
    """
    with ExitStack() as undo:
        tokenizer = Tokenizer.from_folder(source.tokenizer.folder)
        undo.callback(tokenizer.close)      # an error refers to it, and is kept
        decoder = source.decoder
        file = decoder.folder / decoder.config.default_model_filename
        decoding = load_decoding(file, name=decoder.config.name)
        logits = _load_warm(source.logits, placement=source.placement)
        engine = _start(
            logits,
            name=source.name,
            stage=source.logits.config,
            decode=decoding.decode,
            speculation=_load_speculation(source, logits, tokenizer),
            queue=queue,
            metrics=metrics,
        )
        undo.pop_all()
    return TextModel(
        name=source.name,
        tokenizer=tokenizer,
        engine=engine,
        plugins=decoding.plugins,
        limits=ModelLimits(
            max_length=logits.max_length, max_num_seqs=logits.max_num_seqs, vocab_size=logits.vocab_size
        ),
        kv_cache_bytes=logits.kv_cache_bytes,
        precision=logits.metadata.get("genserve.precision", "unknown"),
        loaded_s=time.time(),
    )


def load_logits_stage(
    stage: StageSource,
    *,
    placement: Placement,
    queue: QueueOptions,
    metrics: Metrics,
    statistics: ModelStatistics,
) -> LogitsInference:
    """Load a logits stage that is not part of a text model, with an engine of its own.

    Raises:
        RepositoryError: it cannot be loaded.
        MissingDependency: its runtime is not installed.
    """
    logits, config = _load_warm(stage, placement=placement), stage.config
    engine = _start(
        logits, name=config.name, stage=config, decode=_decode_nothing, queue=queue, metrics=metrics
    )
    return _inference(engine, logits, config, statistics)


def _inference(
    engine: EngineThread, logits: LoadedLogits, config: ModelConfig, statistics: ModelStatistics
) -> LogitsInference:
    return LogitsInference(
        engine,
        config,
        vocab_size=logits.vocab_size,
        max_length=logits.max_length,
        statistics=statistics,
        owns_engine=True,
    )


async def _decode_nothing(sequence: TokenSequence) -> None:
    """The decoding loop of an engine that is only asked for logits."""


def _load_warm(stage: StageSource, *, placement: Placement) -> LoadedLogits:
    """Load a logits stage and run the samples of its `model_warmup` through an engine without a prefix cache.

    So neither metrics nor statistics count them, and no request reuses the KV cache of a sample.

    Raises:
        RepositoryError: the stage cannot be loaded; a sample cannot be read, or was answered with an error.
    """
    logits = load_logits(stage.config, stage.folder, placement=placement)
    batches = warmup_batches(stage.config, stage.path)
    if not batches:
        return logits
    engine = EngineThread(
        Engine(logits, decode=_decode_nothing, prefix_cache=False),
        name=f"warmup-{stage.config.name}",
        max_num_seqs=logits.max_num_seqs,
        limits=QueueLimits(max_requests=max(len(batch.requests) for batch in batches)),
        metrics=Metrics().for_model(stage.config.name),
    )
    inference = _inference(engine, logits, stage.config, ModelStatistics())
    try:
        run_warmups(inference.execute, batches)
    finally:
        inference.close()
    return logits


def _start(
    logits: LoadedLogits,
    *,
    name: str,
    stage: ModelConfig,
    decode: DecodeFunction,
    queue: QueueOptions,
    metrics: Metrics,
    speculation: Speculation | None = None,
) -> EngineThread:
    """Start the engine of the model `name`, whose logits stage has the config `stage`."""
    prefix_cache = boolean_parameter(stage.parameters, "prefix_cache", default=True)
    return EngineThread(
        Engine(
            logits,
            decode=decode,
            prefix_cache=prefix_cache and logits.kv_cache_bytes > 0,
            speculation=speculation,
        ),
        name=name,
        max_num_seqs=logits.max_num_seqs,
        limits=queue.limits(num_cache_tokens=logits.num_blocks * logits.block_size),
        metrics=metrics.for_model(name),
    )


def _load_speculation(
    source: TextModelSource, logits: LoadedLogits, tokenizer: Tokenizer
) -> Speculation | None:
    """Load the draft model of a text model, if it has one."""
    if source.draft is not None:
        return Speculation(_draft_model(source.draft, logits, tokenizer))
    looks_up = looks_up_prompts(source.logits.config, placement=source.placement)
    return Speculation(PromptLookup()) if looks_up else None


def looks_up_prompts(config: ModelConfig, *, placement: Placement) -> bool:
    """Whether tokens are drafted by prompt lookup, by the parameter `speculation` of a logits stage.

    Without the parameter they are if a forward of several tokens of a sequence costs little more than one of
    a single token: that of an ONNX graph with a cache in place, on the CPU.
    """
    method = config.parameters.get("speculation")
    if method is not None:
        return method == "prompt_lookup"
    in_place = cache_kind(config) is CacheKind.IN_PLACE
    return config.backend == "onnxruntime" and in_place and placement.kind != "GPU"


def _draft_model(draft: DraftSource, logits: LoadedLogits, tokenizer: Tokenizer) -> DraftModel:
    """Load the logits stage of another text model, to draft on the CPU."""
    if not tokenizer.has_vocabulary_of(Tokenizer.from_folder(draft.tokenizer.folder)):
        raise RepositoryError(
            f"draft_model {draft.name!r} has another vocabulary: its token ids mean other words",
            remedy="take a smaller model of the same family, whose tokenizer.json is the same",
        )
    drafting = load_logits(draft.logits.config, draft.logits.folder)
    return DraftModel(drafting, vocab_size=logits.vocab_size)
