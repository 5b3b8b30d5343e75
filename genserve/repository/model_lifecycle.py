"""Model lifecycle: loads, replaces and unloads models."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from genserve.config.diagnostics import first_error
from genserve.errors import ConfigError, GenserveError, InferenceError, Status
from genserve.repository.index import (
    ModelEntry,
    all_step_models,
    fingerprint,
    needed_names,
    not_polled,
    scan,
    step_models,
)
from genserve.repository.load_errors import step_error, stopping, unexpected_as_failed
from genserve.repository.load_request import LoadRequest, Upload
from genserve.repository.model_loader import ModelLoader
from genserve.repository.model_validation import Validator
from genserve.repository.model_versions import ModelTable, ModelVersion
from genserve.repository.options import RepositoryOptions
from genserve.repository.text_stages import TextStages, stage_owners
from genserve.repository.unloader import Unloader, return_free_memory
from genserve.textmodel.logits_config import is_logits_stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """What a model is loaded from.

    Attributes:
        config: the fingerprint of its config files.
        versions: the fingerprint of the folder of each version, by number.
        shared: the fingerprints of all other files and of a text model's stages, and the configs of an
            ensemble's steps.
    """

    config: object
    versions: Mapping[int, object]
    shared: object

    def unchanged_versions(self, now: _Files) -> list[int]:
        """Return the versions whose files are the same now; the config may differ."""
        if self.shared != now.shared:
            return []
        return [number for number, files in now.versions.items() if self.versions.get(number) == files]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailedLoad:
    """A load that failed."""

    files: _Files
    ended_s: float
    error: GenserveError


@dataclass(slots=True, eq=False)
class _Model:
    """The state of one model.

    Attributes:
        lock: held while the model is loaded or unloaded.
        is_requested: whether the model was loaded for its own sake, not only as a step of an ensemble.
        waits_for_steps: whether the model is an ensemble that is loaded once all its steps' models are ready,
            or an adapter that is loaded once its base is.
        override: an ensemble or an adapter with the config of a load request.
        upload: the folder of the files of that request.
        stages: the stages that the engine of this text model answers for.
        loaded: the files that the model was loaded from; None: the model is not loaded, or was loaded with
            the config of a load request.
        polled: the files at the poll that last loaded it.
        settling: the files at the last poll if they had changed since `polled`, else None.
        failed: the failure of the last load, if it has failed.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    is_requested: bool = False
    waits_for_steps: bool = False
    override: ModelEntry | None = None
    upload: Upload | None = None
    stages: frozenset[str] = frozenset()
    loaded: _Files | None = None
    polled: _Files | None = None
    settling: _Files | None = None
    failed: _FailedLoad | None = None

    def has_settled(self, files: _Files) -> bool:
        """Record the files at a poll; return whether they are new, and the same as at the poll before."""
        is_changed = files != self.polled
        is_settled = is_changed and files == self.settling
        if is_settled:
            self.polled = files
        self.settling = files if is_changed and not is_settled else None
        return is_settled


class ModelLifecycle:
    """Loads and unloads models; a model is changed by one call at a time. Safe from any thread.

    Attributes:
        validator: the models of the last scan and their rules; the next scan replaces it.
        errors: the errors of the models whose last load has failed, by name; old versions may answer. A stage
            that the engine of a text model answers for has no error of its own.
    """

    def __init__(
        self, roots: Iterable[Path], *, options: RepositoryOptions, table: ModelTable, loader: ModelLoader
    ) -> None:
        """Read the folders; nothing is loaded yet.

        Raises:
            RepositoryError: a root is not a folder.
        """
        self.errors: dict[str, GenserveError] = {}
        self._roots = tuple(roots)
        self._options = options
        self._table = table
        self._loader = loader
        self._unloader = Unloader(table)
        self._models: dict[str, _Model] = {}
        self._following = threading.Lock()
        self._scanning = threading.Lock()
        self.validator: Validator
        self.scan_folders()

    @property
    def entries(self) -> Mapping[str, ModelEntry]:
        """The models at the last scan, by name."""
        return self.validator.entries

    @property
    def text_models(self) -> Mapping[str, TextStages]:
        """The stages of the text models at the last scan, by name."""
        return self.validator.text_models

    @property
    def adapters(self) -> Mapping[str, str]:
        """The bases of the adapters at the last scan, by the adapters' names."""
        return self.validator.adapters

    def load(self, request: LoadRequest) -> None:
        """Load a model; does nothing if it is loaded and its folder has not changed.

        Raises:
            InferenceError: the model cannot be loaded; the old versions keep answering.
        """
        self.scan_folders()
        try:
            with unexpected_as_failed(request.name):
                entry, upload = request.resolve(self.entries)
        except GenserveError as error:
            _log_not_loaded(request.name, error)
            raise
        self._load_with_steps(entry, is_override=bool(request.config_json), upload=upload)
        self._model(request.name).is_requested = True
        self._follow_steps()

    def load_noted(self, entry: ModelEntry) -> None:
        """Load a model; if that fails, `errors` has the error."""
        with suppress(GenserveError):
            self._load_with_steps(entry)
            self._model(entry.name).is_requested = True

    def unload(self, name: str, *, dependents: bool) -> None:
        """Begin to unload a model, and with `dependents` the models of its steps that nothing else needs."""
        if name not in self._models and not self._table.of(name):
            return  # nothing is kept of the names that clients invent
        steps = {step for served in self._table.of(name) for step in needed_names(served.config)}
        model = self._model(name)
        model.is_requested = model.waits_for_steps = False
        model.override = model.upload = None
        self._unload(name)
        if dependents:
            self._unload_unneeded(steps)
        self._follow_steps()

    def forget_failed(self, name: str) -> None:
        """After a load that has failed: unload what it has loaded, and do not wait for what was missing."""
        if name in self.entries:  # nothing is kept of the names that clients invent
            self._model(name).waits_for_steps = False
            self._unload_unneeded({step.name for step in all_step_models(self.entries[name], self.entries)})

    def join_unloads(self) -> None:
        """Wait until the unloads that have begun are over."""
        self._unloader.join()

    def _unload_unneeded(self, steps: Iterable[str]) -> None:
        """Unload the models of steps that were not loaded for their own sake, and that no ensemble needs."""
        needed = {step for served in self._table.served for step in needed_names(served.config)}
        for step in steps:
            if step not in needed and not self._model(step).is_requested:
                self._unload(step)

    def serve(self, name: str, fresh: Iterable[ModelVersion]) -> None:
        """Serve `fresh` versions of a model in place of the old ones, which finish the requests they have."""
        self._unloader.unload(self._table.put(name, fresh), timeout_s=self._options.exit_timeout_s)

    def note_folders(self) -> None:
        """Record the files of all models, which `follow_folders` compares."""
        for name, entry in self.entries.items():
            self._model(name).polled = self._files(entry)

    def follow_folders(self) -> bool:
        """Load new and changed models, unload removed ones.

        Files that somebody is still copying are not loaded: a folder that has changed must look the same at
        the next call.

        Returns:
            Whether folders have changed since the last call, so that this should be called again soon.
        """
        self.scan_folders()
        for name, model in list(self._models.items()):  # not the last scan's, which may not be a poll's
            if model.polled is not None and name not in self.entries:
                self._unload(name)
                model.polled = None
        changed = [
            name for name, entry in self.entries.items() if self._model(name).has_settled(self._files(entry))
        ]
        for entry in self.owners(changed):
            self.load_noted(entry)
        self._follow_steps()
        return any(self._model(name).settling is not None for name in self.entries)

    def close(self) -> None:
        """Unload all models; blocks."""
        self._unloader.is_closing = True
        for name in dict.fromkeys(served.name for served in self._table.served):
            self._unload(name, timeout_s=0)
        self._unloader.join()

    def owners(self, names: Iterable[str]) -> list[ModelEntry]:
        """Return the named models, each once, and for a stage that an engine answers for its text model."""
        validator = self.validator
        entries, owners = validator.entries, stage_owners(validator.text_models)
        found = dict.fromkeys(owners.get(name, name) for name in names)
        return [entries[name] for name in found if name in entries]

    def scan_folders(self) -> None:
        """Read the folders again; nothing is loaded or unloaded."""
        with self._scanning:  # a scan never replaces the result of a later one
            entries = scan(
                self._roots, config_name=self._options.config_name, strict_paths=self._options.strict_paths
            )
            self.validator = self._validator(entries)

    def _validator(self, entries: Mapping[str, ModelEntry]) -> Validator:
        directory = self._options.backend_directory
        return Validator(entries, backend_folders=[directory] if directory else ())

    def _model(self, name: str) -> _Model:
        return self._models.setdefault(name, _Model())

    def _follow_steps(self) -> None:
        """Unload the ensembles with a step that is not ready; load waiting ones whose steps all are.

        As in Triton. An adapter follows its base in the same way, and is loaded again with it. Not to be
        called with the lock of a model.
        """
        with self._following:
            for name in self._table.outdated_adapters():
                self._model(name).waits_for_steps = True
            while incomplete := self._table.incomplete_ensembles():
                for name in incomplete:
                    self._model(name).waits_for_steps = True
                    self._unload(name)
            while complete := [entry for entry in self._waiting() if self._has_steps(entry)]:
                for entry in complete:
                    model = self._model(entry.name)
                    model.waits_for_steps = False
                    is_override = model.override is not None
                    with suppress(GenserveError):
                        self._load_with_steps(entry, is_override=is_override, upload=model.upload)
            for name in self._table.outdated_adapters():  # the engine of their old base ends
                error = self.errors.get(name)
                self._unload(name)
                if error is not None:
                    self.errors[name] = error

    def _waiting(self) -> list[ModelEntry]:
        """Return the ensembles that wait for their steps."""
        waiting = [(name, model) for name, model in list(self._models.items()) if model.waits_for_steps]
        found = [model.override or self.entries.get(name) for name, model in waiting]
        return [entry for entry in found if entry is not None]

    def _has_steps(self, entry: ModelEntry) -> bool:
        """Whether the models of an ensemble's steps are ready, except the stages that load with it."""
        if entry.name in self.text_models:
            return all(self._table.get(step.name, step.wanted_version) for step in self._steps_before(entry))
        if entry.base_model is not None:
            return self._table.get(entry.base_model) is not None
        return self._table.has_steps(entry.config)

    def _steps_before(self, entry: ModelEntry) -> list[ModelEntry]:
        """Return the models of an ensemble's steps that are loaded before it.

        The engine of a text model is its logits and decoder stages; its tokenizer is a model of its own too.
        """
        stages = self.text_models.get(entry.name)
        return [stages["tokenizer"]] if stages else step_models(entry, self.entries)

    def _load_with_steps(
        self, requested: ModelEntry, *, is_override: bool = False, upload: Upload | None = None
    ) -> None:
        """Load a model; an ensemble after the models of its steps that are not ready.

        A failure is logged, and recorded in `errors` until a load succeeds, or the model is unloaded.

        Args:
            requested: the model; a stage of a text model loads the text model.
            is_override: whether the config comes from a load request; the next load reads the folder again.
            upload: the folder of the files of the load request, if it has any.
        """
        asked_s = time.monotonic()
        owner = stage_owners(self.text_models).get(requested.name, requested.name)
        model = self._model(owner)
        with model.lock:
            validator = self.validator
            if not is_override:  # the folder may have changed while this waited
                requested = validator.entries.get(requested.name, requested)
            if validator.entries.get(requested.name) is not requested:
                validator = self._validator({**validator.entries, requested.name: requested})
            entry = validator.entries.get(owner, requested)
            files, failed = self._files(entry), model.failed
            if not is_override and failed and failed.files == files and failed.ended_s > asked_s:
                raise failed.error  # the same load has failed while this one waited for it
            answers = all(map(self._table.of, (owner, *model.stages)))
            answers = answers and owner not in self._table.outdated_adapters()
            if is_override or model.loaded != files or not answers:
                try:
                    with unexpected_as_failed(owner):
                        self._replace(
                            entry, requested, validator, files, is_override=is_override, upload=upload
                        )
                except GenserveError as error:
                    model.failed = _FailedLoad(files=files, ended_s=time.monotonic(), error=error)
                    self._record_error(owner, error)
                    raise
                model.loaded = None if is_override else files
            model.failed = None
            for name in (owner, requested.name, *model.stages):
                self.errors.pop(name, None)

    def _record_error(self, name: str, error: GenserveError) -> None:
        cause = error.__cause__  # names file and line
        recorded = cause if isinstance(cause, ConfigError) else error
        if name in self.entries:  # nothing is kept of the names that clients invent
            self.errors[name] = recorded
        _log_not_loaded(name, recorded)

    def _replace(
        self,
        entry: ModelEntry,
        requested: ModelEntry,
        validator: Validator,
        files: _Files,
        *,
        is_override: bool,
        upload: Upload | None,
    ) -> None:
        """Load a model, whose lock is held, and unload the versions that it replaces.

        As in Triton, a version whose files have not changed, of a model whose config has not, goes on with
        its sequences: a version that comes, goes or changes leaves the other versions alone.
        """
        started_s = time.monotonic()
        model = self._model(entry.name)
        for each in {requested.name: requested, entry.name: entry}.values():
            if (error := validator.poll_error(each)) is not None:
                raise not_polled(each.name, remedy=str(error)) from error
        is_text_model = entry.name in self.text_models
        is_broken = is_text_model and entry.name not in validator.text_models
        if is_broken or (upload is not None and (is_text_model or is_logits_stage(entry.config))):
            raise _runs_in_engine(entry.name)
        if not is_text_model:
            self._require_sound_stages(entry, validator)
        self._load_missing_steps(entry)
        if (error := validator.step_error(entry)) is not None:  # the ensemble gets no version in the index
            text = f"load failed for model '{entry.name}': {error.text}\n"
            raise InferenceError(text, remedy=str(error)) from error
        unchanged: list[ModelVersion] = []
        is_outdated = entry.name in self._table.outdated_adapters()
        if model.loaded and not (is_override or is_outdated or is_text_model or model.stages):
            numbers = model.loaded.unchanged_versions(files)
            unchanged = [served for served in self._table.of(entry.name) if served.version in numbers]
        fresh = self._loader.load(entry, validator, unchanged=unchanged, upload=upload)
        if self._unloader.is_closing:
            for served in fresh:
                if served not in unchanged:  # `close` closes the unchanged ones
                    served.close(timeout_s=0)
            raise stopping()
        return_free_memory()
        names = {served.name for served in fresh}
        for name in {entry.name, *model.stages} | names:
            self.serve(name, [served for served in fresh if served.name == name])
        model.stages = frozenset(names - {entry.name})
        _log_loaded(entry.name, fresh, seconds=time.monotonic() - started_s)
        model.override = model.upload = None
        if is_override and (requested.is_ensemble or requested.base_model):
            model = self._model(requested.name)
            model.override, model.upload = requested, upload

    def _require_sound_stages(self, entry: ModelEntry, validator: Validator) -> None:
        """Raise if an ensemble is no text model any more for an error in a step, so that its engine stays."""
        for step in step_models(entry, self.entries) if self._model(entry.name).stages else ():
            if (error := first_error(validator.diagnostics(step))) is not None:
                raise step_error(entry.name, step, not_polled(step.name, remedy=str(error))) from error

    def _load_missing_steps(self, entry: ModelEntry) -> None:
        """Load the models of an ensemble's steps that are not ready: all, even if one of them fails."""
        failures: list[tuple[ModelEntry, InferenceError]] = []
        for step in self._steps_before(entry):
            below = {step.name, *(model.name for model in all_step_models(step, self.entries))}
            if self._table.of(step.name) or entry.name in below:
                continue  # it is ready, or depends on the ensemble itself
            try:
                self._load_with_steps(step)
            except InferenceError as error:
                failures.append((step, error))
        if failures:
            self._model(entry.name).waits_for_steps = True
            step, failure = failures[0]
            raise step_error(entry.name, step, failure) from (failure.__cause__ or failure)

    def _unload(self, name: str, *, timeout_s: float | None = None) -> None:
        timeout_s = self._options.exit_timeout_s if timeout_s is None else timeout_s
        model = self._model(name)
        with model.lock:
            for each in (name, *model.stages):
                self._unloader.unload(self._table.put(each, ()), timeout_s=timeout_s)
            model.stages = frozenset()
            model.loaded = model.failed = None
            self.errors.pop(name, None)

    def _files(self, entry: ModelEntry) -> _Files:
        versions: dict[int, list[object]] = {number: [] for number in entry.versions}
        config: list[object] = []
        others: list[object] = []
        for trace in fingerprint(entry.path):
            part = trace[0].partition("/")[0]
            if part in ("config.pbtxt", "configs"):
                config.append(trace)
            else:
                versions.get(int(part) if part.isdecimal() else 0, others).append(trace)
        stages = [fingerprint(stage.path) for stage in self.text_models.get(entry.name, {}).values()]
        steps = {model.name: model.parsed.message for model in step_models(entry, self.entries)}
        return _Files(config=config, versions=versions, shared=(others, stages, steps))


def _log_loaded(name: str, fresh: Iterable[ModelVersion], *, seconds: float) -> None:
    loaded = [served for served in fresh if served.name == name]
    versions = ", ".join(str(served.version) for served in loaded)
    contexts = [f"; context length {served.text_model.context}" for served in loaded if served.text_model]
    logger.info(
        "model %s version %s is ready, loaded in %.1f s%s", name, versions, seconds, "".join(contexts[:1])
    )


def _log_not_loaded(name: str, error: GenserveError) -> None:
    logger.error("model %s is not loaded: %s", name, error)


def _runs_in_engine(name: str) -> InferenceError:
    """Return the error of a load request that breaks a text model."""
    return InferenceError(
        f"model '{name}' runs in a text engine, which cannot be loaded like this",
        status=Status.UNSUPPORTED,
        remedy="change its files in the repository, or its config so that its three stages remain",
    )
