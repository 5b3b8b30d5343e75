"""Model loader: from the folder of a model to the versions that answer its requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from genserve.backends.backend import Backend, ModelSource, Placement, boolean_parameter
from genserve.backends.registry import find_backend
from genserve.backends.warmup import run_warmups, warmup_batches
from genserve.batching.model_instance import ModelInstances, group_placements
from genserve.batching.queue_scheduler import make_scheduler
from genserve.batching.rate_limiter import RateLimiter, ResourcePermit
from genserve.config.model_config import EnsembleStep, InstanceGroup, ModelConfig
from genserve.config.schema import model_config, new_model_config
from genserve.engine.engine_thread import EngineThread
from genserve.errors import RepositoryError, drop_frames
from genserve.files import read_regular_text
from genserve.generation_metrics import Metrics
from genserve.inference import InferenceServer
from genserve.inference_statistics import ModelStatistics
from genserve.repository.config_resolution import ResolvedModel, resolve_model
from genserve.repository.ensemble import Ensemble
from genserve.repository.index import ModelEntry
from genserve.repository.load_errors import VersionFailed, load_reason, version_error
from genserve.repository.load_request import Upload
from genserve.repository.model_validation import Validator
from genserve.repository.model_versions import (
    UNLOADED,
    ModelRuntime,
    ModelState,
    ModelTable,
    ModelVersion,
)
from genserve.repository.options import RepositoryOptions
from genserve.repository.response_cache import ResponseCache
from genserve.repository.text_stages import Role
from genserve.textmodel.decoder_stage import DecoderInference
from genserve.textmodel.logits_config import is_logits_stage
from genserve.textmodel.logits_inference import LogitsInference
from genserve.textmodel.logits_runtime import LoadedLogits, engine_placements, load_logits
from genserve.textmodel.recordings import require_same_answers
from genserve.textmodel.text_inference import TextInference
from genserve.textmodel.text_model import TextModel
from genserve.textmodel.text_model_loader import load_logits_stage, load_text_model

logger = logging.getLogger(__name__)

_MAX_LABELS_BYTES = 64 << 20     # a million classes have about 20 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """A started runtime of a model that is not in the table of versions yet."""

    model: ResolvedModel
    runtime: ModelRuntime
    statistics: ModelStatistics
    text_model: TextModel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoader:
    """Loads the versions of models, which share the attributes of this."""

    server: InferenceServer
    table: ModelTable
    options: RepositoryOptions
    metrics: Metrics
    cache: ResponseCache | None
    rate_limiter: RateLimiter | None

    def load(
        self,
        entry: ModelEntry,
        validator: Validator,
        *,
        unchanged: Iterable[ModelVersion] = (),
        upload: Upload | None = None,
    ) -> list[ModelVersion]:
        """Load the versions of a model, warmed up and ready, and two of the stages of a text model.

        The index says that a model is loading, or why it could not be loaded, unless old versions answer.

        Args:
            entry: the model.
            validator: the rules for the models of the repository.
            unchanged: versions that answer, and whose files have not changed. A version that the model still
                serves, with the same config, is returned as it is.
            upload: the folder of the model's files, if they came with the load request.

        Raises:
            InferenceError: one version cannot be loaded; the versions that were loaded before it are closed.
        """
        name, version = entry.name, (entry.versions or (1,))[-1]
        serves = bool(self.table.of(name))
        if not serves:
            self.table.set_state(name, version, ModelState.LOADING)
        try:
            return self._load_all(entry, validator, unchanged=unchanged, upload=upload)
        except Exception as error:
            failed = error if isinstance(error, VersionFailed) else VersionFailed(error, version=version)
        if not serves:
            reason = load_reason(failed.error)
            self.table.set_state(name, failed.version, ModelState.UNAVAILABLE, reason=reason)
            for other in failed.others:
                self.table.set_state(name, other, ModelState.UNAVAILABLE, reason=UNLOADED)
        reported = version_error(name, failed)
        drop_frames(failed.error)   # which is kept: the next load may need the memory
        raise reported from failed.error

    def _load_all(
        self,
        entry: ModelEntry,
        validator: Validator,
        *,
        unchanged: Iterable[ModelVersion],
        upload: Upload | None,
    ) -> list[ModelVersion]:
        """Load the versions of a model; raises VersionFailed, and what `resolve_model` raises."""
        model = self._like_its_base(resolve_model(entry, validator, options=self.options))
        for warning in model.warnings:
            logger.warning("%s: %s (%s)", warning.where, warning.message, warning.remedy)
        kept = [
            served
            for served in unchanged
            if served.version in model.versions and _differ_in_policy_only(served.config, model.config)
        ]
        loaded: list[ModelVersion] = []
        for version in sorted({*model.versions} - {served.version for served in kept}):
            try:
                loaded += self._load(model, version, upload=upload)
            except BaseException as error:
                for other in loaded:
                    other.close(timeout_s=0)
                if not isinstance(error, Exception):
                    raise
                others = [other for other in model.versions if other != version]
                raise VersionFailed(error, version=version, others=others) from error
        for served in kept:
            served.config = model.config
        return [*kept, *loaded]

    def _load(self, model: ResolvedModel, version: int, *, upload: Upload | None) -> list[ModelVersion]:
        started_s = time.monotonic()
        runtimes = self._start(model, version)
        return [
            ModelVersion(
                started.runtime,
                config=started.model.config,
                version=version if started.model is model else started.model.versions[-1],
                statistics=started.statistics,
                cache=None if started.model.runs_in_engine else self._cache_of(started.model.config),
                labels=_output_labels(started.model.config, started.model.path),
                upload=upload,
                load_s=time.monotonic() - started_s,
                histogram_latencies=self.options.histogram_latencies,
                text_model=started.text_model,
            )
            for started in runtimes
        ]

    def _cache_of(self, config: ModelConfig) -> ResponseCache | None:
        return self.cache if config.response_cache else None

    def _start(self, model: ResolvedModel, version: int) -> list[_Started]:
        """Start the runtimes that a model needs, by who runs it."""
        if model.role is Role.ENSEMBLE:
            return self._text_model(model)
        statistics = ModelStatistics()
        if model.config.base_model is not None:
            return [self._adapter(model, version, statistics)]
        if model.runs_in_engine:
            runtime: ModelRuntime = load_logits_stage(
                self._source(model, version),
                limits=self.options.queue_limits,
                statistics=statistics,
                max_model_len=self.options.max_model_len,
            )
        elif model.config.ensemble_steps:
            runtime = Ensemble(
                model.config, server=self.server, config_of=self._config_of, statistics=statistics
            )
        else:
            runtime = self._instances(model, version, statistics)
        return [_Started(model=model, runtime=runtime, statistics=statistics)]

    def _text_model(self, model: ResolvedModel) -> list[_Started]:
        """Start the engine of a text model, which answers for the ensemble and for two of its stages."""
        logits, decoder = model.stages["logits"], model.stages["decoder"]
        text_model = load_text_model(
            model.name,
            self._sources(model.stages),
            draft=self._sources(logits.draft) if logits.draft else None,
            limits=self.options.queue_limits,
            defaults=self.options.default_sampling_params,
            max_model_len=self.options.max_model_len,
            prefix_cache_folder=self.options.prefix_cache_folder,
        )
        verifies = boolean_parameter(logits.config.parameters, "verify_on_load", default=False)
        if verifies and self.options.verifies_recordings:
            try:
                require_same_answers(text_model, model.path)
            except BaseException:
                text_model.close()
                raise
        engine, of_text, of_logits = text_model.engine, ModelStatistics(), ModelStatistics()
        assert isinstance(engine, EngineThread)
        of_stage = LogitsInference(
            engine, logits.config, logits=text_model.logits, statistics=of_logits, owns_engine=False
        )
        return [
            _Started(
                model=model,
                runtime=TextInference(text_model, model.config, statistics=of_text),
                statistics=of_text,
                text_model=text_model,
            ),
            _Started(model=logits, runtime=of_stage, statistics=of_logits),
            _Started(
                model=decoder,
                runtime=DecoderInference(engine, text_model=model.name),
                statistics=ModelStatistics(),
            ),
        ]

    def _like_its_base(self, model: ResolvedModel) -> ResolvedModel:
        """Give the config of an adapter the inputs and outputs of its base; other models stay as they are."""
        if model.config.base_model is None:
            return model
        base, message = self._base(model).config.message, new_model_config()
        message.CopyFrom(model.config.message)
        for field in ("max_batch_size", "input", "output", "model_transaction_policy"):
            message.ClearField(field)
        message.max_batch_size = base.max_batch_size
        message.input.extend(base.input)
        message.output.extend(base.output)
        message.model_transaction_policy.CopyFrom(base.model_transaction_policy)
        return replace(model, config=model_config(message, name=model.name))

    def _base(self, adapter: ResolvedModel) -> ModelVersion:
        """Return the base of an adapter, which answers; raises InferenceError."""
        return self.table.find(adapter.config.base_model or "")

    def _adapter(self, model: ResolvedModel, version: int, statistics: ModelStatistics) -> _Started:
        """Load an adapter into the engine of its base."""
        base = self._base(model)
        assert base.text_model is not None      # or a rule has rejected the adapter
        text_model = base.text_model.with_adapter(model.name, model.path / str(version))
        runtime = TextInference(text_model, base.config, statistics=statistics)
        return _Started(model=model, runtime=runtime, statistics=statistics, text_model=text_model)

    def _sources(self, stages: Mapping[str, ResolvedModel]) -> dict[str, ModelSource]:
        return {role: self._source(stage, stage.versions[-1]) for role, stage in stages.items()}

    def _source(self, model: ResolvedModel, version: int) -> ModelSource:
        config, cache_bytes = model.config, self.options.kv_cache_bytes
        if cache_bytes is not None and is_logits_stage(config):
            parameters = {"kv_cache_bytes": str(cache_bytes), **config.parameters}
            config = replace(config, parameters=parameters)
        return ModelSource(
            config=config,
            version=version,
            path=model.path,
            folder=model.path / str(version),
            server=self.server,
            metrics=self.metrics,
        )

    def _config_of(self, step: EnsembleStep) -> ModelConfig:
        return self.table.find(step.model_name, step.model_version).config

    def _instances(self, model: ResolvedModel, version: int, statistics: ModelStatistics) -> ModelInstances:
        config = model.config
        backend = find_backend(config.backend, backend_directory=self.options.backend_directory)
        source = self._source(model, version)
        shared = backend.load(source)
        warmups = warmup_batches(config, model.path)

        def start(placement: Placement) -> Backend:
            instance = backend(source, shared, placement)
            try:
                run_warmups(instance.execute, warmups)
            except BaseException:
                instance.close()
                raise
            return instance

        placements = [
            (group, placement) for group in config.instance_groups for placement in group_placements(group)
        ]
        permits = self._permits(placements)
        try:
            scheduler = make_scheduler(
                config, num_instances=len(placements), path=model.path, permits=permits
            )
        except RepositoryError:
            _withdraw(permits)
            raise
        return ModelInstances(
            start,
            placements=[placement for _, placement in placements],
            scheduler=scheduler,
            statistics=statistics,
            exit_timeout_s=self.options.exit_timeout_s,
            permits=permits,
        )

    def _permits(self, placements: Iterable[tuple[InstanceGroup, Placement]]) -> list[ResourcePermit]:
        """Register the instances with the rate limiter, if there is one: all of them, or none."""
        permits: list[ResourcePermit] = []
        if self.rate_limiter is None:
            return permits
        try:
            for group, placement in placements:
                claim = group.rate_limiter
                permits.append(self.rate_limiter.register(claim, device_id=placement.device_id))
        except RepositoryError:
            _withdraw(permits)
            raise
        return permits


def _differ_in_policy_only(old: ModelConfig, new: ModelConfig) -> bool:
    """Whether two configs of a model are the same but for the choice of versions."""
    policy = new_model_config()
    policy.version_policy.CopyFrom(new.message.version_policy)
    message = new_model_config()
    message.CopyFrom(old.message)
    message.ClearField("version_policy")
    message.MergeFrom(policy)
    return bool(message == new.message)


def _withdraw(permits: Iterable[ResourcePermit]) -> None:
    for permit in permits:
        permit.withdraw()


def stage_placement(entry: ModelEntry) -> Placement:
    """Return the first device of a logits stage in a server. Raises what `resolve_model` raises."""
    return engine_placements(_resolve_alone(entry).config)[0]


def load_stage_logits(entry: ModelEntry) -> LoadedLogits:
    """Load the logits of a stage where a server would, without an engine.

    Raises:
        RepositoryError: the config has an error, or the file cannot be loaded.
        MissingDependency: the model's runtime is not installed.
    """
    model = _resolve_alone(entry)
    folder = model.path / str(model.versions[-1])
    return load_logits(model.config, folder, placements=engine_placements(model.config))


def _resolve_alone(entry: ModelEntry) -> ResolvedModel:
    entry = replace(entry, wanted_version=int(entry.latest_version().name))
    return resolve_model(entry, Validator({entry.name: entry}), options=RepositoryOptions())


def _output_labels(config: ModelConfig, path: Path) -> dict[str, Sequence[str]]:
    """Read the label files of a model's outputs: one label per line, its number is the class."""
    labels: dict[str, Sequence[str]] = {}
    for spec in config.outputs:
        if spec.label_filename:
            file = path / spec.label_filename
            try:
                labels[spec.name] = read_regular_text(file, max_bytes=_MAX_LABELS_BYTES).splitlines()
            except OSError as error:
                logger.warning("%s cannot be read: %s; its classes have no labels", file, error.strerror)
    return labels
