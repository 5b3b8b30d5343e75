"""Text model loader: from the resolved configs of the stages to running engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from genserve.backends.backend import ModelSource, boolean_parameter, integer_parameter
from genserve.backends.warmup import run_warmups, warmup_batches
from genserve.config.model_config import ModelConfig
from genserve.engine.admission_control import QueueLimits
from genserve.engine.decoding_loops import DecodeFunction
from genserve.engine.disk_cache import DiskCache, PrefixCacheFolder
from genserve.engine.engine import Engine
from genserve.engine.engine_thread import (
    EndReasoning,
    EngineThread,
    SequencesOf,
    no_reasoning,
    no_sequences,
)
from genserve.engine.speculation import DraftModel, PromptLookup, Speculation
from genserve.engine.token_sequence import TokenSequence
from genserve.errors import RepositoryError
from genserve.generation_metrics import Metrics
from genserve.inference_statistics import ModelStatistics
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.adapters import MAX_LOADED, Adapters
from genserve.textmodel.calibration import read_calibration
from genserve.textmodel.decoder_stage import load_decoding
from genserve.textmodel.disk_prefixes import open_disk_cache
from genserve.textmodel.logits_config import CacheKind, cache_kind, file_states, version_files
from genserve.textmodel.logits_inference import LogitsInference
from genserve.textmodel.logits_runtime import LoadedLogits, engine_placements, load_logits
from genserve.textmodel.receipts import ModelReceipts
from genserve.textmodel.sequence_builder import SequenceBuilder
from genserve.textmodel.text_model import TextModel

Stages: TypeAlias = Mapping[str, ModelSource]       # "tokenizer", "logits" and "decoder", resolved
Limits: TypeAlias = Callable[[int], QueueLimits]    # an engine's limits, by the tokens of its KV cache
SamplingDefaults: TypeAlias = Callable[[Path], Mapping[str, Any]]   # by the folder of a tokenizer stage


def load_text_model(
    name: str,
    stages: Stages,
    *,
    draft: Stages | None,
    limits: Limits,
    defaults: SamplingDefaults,
    max_model_len: int | None,
    prefix_cache_folder: PrefixCacheFolder | None = None,
) -> TextModel:
    """Load the three stages of a text model and start its engine.

    Args:
        name: the name of the text model.
        stages: its stages.
        draft: the stages of another text model, which drafts tokens on the CPU; None: no draft model.
        limits: the limits of the queue in front of the engine.
        defaults: reads its default sampling parameters.
        max_model_len: the tokens of a sequence; None: as many as model, config and KV cache allow.
        prefix_cache_folder: where the blocks of its prefix cache are written; None: nowhere.

    Raises:
        RepositoryError: a stage cannot be loaded, or the draft model has another vocabulary.
        MissingDependency: the runtime of the logits stage is not installed.
    """
    files = file_states(stages)
    with ExitStack() as undo:
        tokenizer = Tokenizer.from_folder(stages["tokenizer"].folder)
        undo.callback(tokenizer.close)      # an error refers to it, and is kept
        default_sampling_params = defaults(stages["tokenizer"].folder)
        calibration = read_calibration(stages["logits"].folder)
        decoder = stages["decoder"]
        path = decoder.folder / decoder.config.default_model_filename
        decoding = load_decoding(path, name=decoder.name, parameters=decoder.config.parameters)
        logits = _load_warm(stages["logits"], max_model_len=max_model_len)
        config = stages["logits"].config
        speculation: Speculation | None = None
        if draft is not None:
            speculation = Speculation(_draft_model(draft, config, logits=logits, tokenizer=tokenizer))
        elif looks_up_prompts(config):
            speculation = Speculation(PromptLookup())
        builder = SequenceBuilder(
            name=name,
            tokenizer=tokenizer,
            decoding=decoding,
            logits=logits,
            receipts=ModelReceipts(stages, name=name, tokenizer=tokenizer, files=files),
        )
        metrics = stages["logits"].metrics.for_model(name)
        adapters = Adapters(
            model=name,
            logits=logits,
            metrics=metrics,
            max_loaded=integer_parameter(config.parameters, "max_loaded_adapters", default=MAX_LOADED),
        )
        disk_cache = open_disk_cache(
            logits,
            stages,
            name=name,
            files=files,
            folder=prefix_cache_folder,
            metrics=metrics,
        )
        if disk_cache is not None:
            undo.callback(disk_cache.close)
        engine = _start(
            logits,
            stages["logits"],
            name=name,
            disk_cache=disk_cache,
            limits=limits,
            sequences_of=builder.sequences,
            end_reasoning=builder.end_reasoning,
            decode=decoding.decode,
            speculation=speculation,
            adapters=adapters,
        )
        undo.pop_all()
    return TextModel(
        name=name,
        tokenizer=tokenizer,
        engine=engine,
        decoding=decoding,
        builder=builder,
        logits=logits,
        default_sampling_params=default_sampling_params,
        weights_bytes=sum(file.stat().st_size for file in version_files(stages["logits"].folder)),
        disk_cache=disk_cache,
        calibration=calibration,
        adapters=adapters,
    )


def load_logits_stage(
    source: ModelSource, *, limits: Limits, statistics: ModelStatistics, max_model_len: int | None
) -> LogitsInference:
    """Load a logits stage that is not part of a text model, with an engine of its own.

    Args:
        source: the stage, with its resolved config.
        limits: the limits of the queue in front of the engine.
        statistics: counts the executions.
        max_model_len: see `load_text_model`.

    Raises:
        RepositoryError: the stage cannot be loaded.
        MissingDependency: the runtime of the stage is not installed.
    """
    logits = _load_warm(source, max_model_len=max_model_len)
    engine = _start(logits, source, name=source.name, limits=limits)
    return LogitsInference(engine, source.config, logits=logits, statistics=statistics, owns_engine=True)


def looks_up_prompts(config: ModelConfig) -> bool:
    """Whether tokens are drafted by prompt lookup, by the parameter `speculation` of a logits stage.

    Without the parameter they are if a forward of several tokens of a sequence costs little more than one of
    a single token: that of an ONNX graph with a cache in place, on the CPU.
    """
    method = config.parameters.get("speculation")
    if method is not None:
        return method == "prompt_lookup"
    in_place = cache_kind(config) is CacheKind.IN_PLACE
    return config.backend == "onnxruntime" and in_place and engine_placements(config)[0].kind != "GPU"


async def _decode_nothing(sequence: TokenSequence) -> None:
    """Decode nothing: the engine is only asked for logits."""


def _load_warm(source: ModelSource, *, max_model_len: int | None) -> LoadedLogits:
    """Load a logits stage and run the samples of its `model_warmup`, each time in an engine of its own.

    So neither metrics nor statistics count them, and nothing reuses the KV cache of a sample, not even its
    next execution.

    Raises:
        RepositoryError: the stage cannot be loaded; a sample cannot be read, or was answered with an error.
    """
    config = source.config
    logits = load_logits(
        config, source.folder, placements=engine_placements(config), max_model_len=max_model_len
    )
    for batch in warmup_batches(config, source.path):
        for name in batch.requests[0].inputs:
            if config.input(name) is None:
                raise RepositoryError(
                    f"failed to run warmup sample '{batch.name}': unexpected inference input '{name}' for "
                    f"model '{config.name}'",
                    remedy="leave it out of `model_warmup`, or declare it",
                )
        for _ in range(batch.count):
            engine = EngineThread(
                Engine(logits, decode=_decode_nothing, prefix_cache=False),
                name=f"warmup-{source.name}",
                max_num_seqs=logits.max_num_seqs,
                limits=QueueLimits(max_requests=len(batch.requests)),
                metrics=Metrics().for_model(source.name),
            )
            statistics = ModelStatistics()
            stage = LogitsInference(engine, config, logits=logits, statistics=statistics, owns_engine=True)
            try:
                run_warmups(stage.execute, [replace(batch, count=1)])
            finally:
                stage.close()
    return logits


def _start(
    logits: LoadedLogits,
    stage: ModelSource,
    *,
    name: str,
    limits: Limits,
    disk_cache: DiskCache | None = None,
    sequences_of: SequencesOf = no_sequences,
    end_reasoning: EndReasoning = no_reasoning,
    decode: DecodeFunction = _decode_nothing,
    speculation: Speculation | None = None,
    adapters: Adapters | None = None,
) -> EngineThread:
    """Start the engine of the model `name`, whose logits stage is `stage`."""
    prefix_cache = boolean_parameter(stage.config.parameters, "prefix_cache", default=True)
    metrics = stage.metrics.for_model(name)
    metrics.cache(block_size=logits.block_size, num_blocks=logits.num_blocks)
    return EngineThread(
        Engine(
            logits,
            decode=decode,
            prefix_cache=prefix_cache and logits.kv_cache_bytes > 0,
            disk_cache=disk_cache,
            speculation=speculation,
        ),
        name=name,
        max_num_seqs=logits.max_num_seqs,
        limits=limits(logits.num_blocks * logits.block_size),
        metrics=metrics,
        sequences_of=sequences_of,
        end_reasoning=end_reasoning,
        adapters=adapters,
        on_close=logits.close,
    )


def _draft_model(
    draft: Stages, config: ModelConfig, *, logits: LoadedLogits, tokenizer: Tokenizer
) -> DraftModel:
    """Load the logits stage of another text model, to draft on the CPU."""
    if not tokenizer.has_vocabulary_of(Tokenizer.from_folder(draft["tokenizer"].folder)):
        raise RepositoryError(
            f"draft_model {config.parameters['draft_model']!r} has another vocabulary: its token ids stand "
            "for other tokens",
            remedy="take a smaller model of the same family, whose tokenizer.json is the same",
        )
    source = draft["logits"]
    return DraftModel(load_logits(source.config, source.folder), vocab_size=logits.vocab_size)
