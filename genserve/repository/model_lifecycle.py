"""Model lifecycle: loads, replaces and unloads models."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from genserve.config.diagnostics import first_error
from genserve.errors import (
    ConfigError,
    GenserveError,
    InferenceError,
    RepositoryError,
    Status,
)
from genserve.repository.config_resolution import check_usable
from genserve.repository.ensemble_rules import ensemble_diagnostics
from genserve.repository.index import ModelEntry, all_step_models, fingerprint, not_polled, scan, step_models
from genserve.repository.load_errors import step_error, stopping, unexpected_as_failed
from genserve.repository.load_request import LoadRequest, Upload
from genserve.repository.model_loader import ModelLoader
from genserve.repository.model_versions import ModelState, ModelTable, ModelVersion
from genserve.repository.options import RepositoryOptions
from genserve.repository.text_stages import TextStages, stage_owners, text_models, text_stages
from genserve.textmodel.logits_config import is_logits_stage

logger = logging.getLogger(__name__)

_C_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailedLoad:
    """A load that failed."""

    files: object       # the fingerprint of the folders
    ended_s: float
    error: GenserveError


@dataclass(slots=True, eq=False)
class _Model:
    """The state of one model.

    Attributes:
        lock: held while the model is loaded or unloaded.
        is_requested: it was loaded for its own sake, not only as a step of an ensemble.
        waits_for_steps: an ensemble, to be loaded once the models of all its steps are ready.
        override: an ensemble with the config of a load request.
        stages: the stages that the engine of this text model answers for.
        loaded: the fingerprint of the folders that it was loaded from; None: it is not loaded, or with the
            config of a load request.
        polled: the fingerprint of the folders at the poll that last loaded it.
        settling: that of folders that had changed at the last poll; None: they had not.
        failed: the last load that failed; None: none has.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    is_requested: bool = False
    waits_for_steps: bool = False
    override: ModelEntry | None = None
    stages: frozenset[str] = frozenset()
    loaded: object = None
    polled: object = None
    settling: object = None
    failed: _FailedLoad | None = None

    def has_settled(self, files: object) -> bool:
        """Record the fingerprint at a poll; whether it has changed, and is that of the poll before."""
        is_changed = files != self.polled
        is_settled = is_changed and files == self.settling
        if is_settled:
            self.polled = files
        self.settling = files if is_changed and not is_settled else None
        return is_settled


class ModelLifecycle:
    """Loads and unloads models; a model is changed by one call at a time. Safe from any thread.

    Attributes:
        entries: the folders at the last scan; replaced, never changed.
        text_models: the text models among them, with their stages.
        errors: of the models whose load at the start, or by polling, has failed.
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
        self._unloader = _Unloader(table)
        self._models: dict[str, _Model] = {}
        self._following = threading.Lock()
        self._scanning = threading.Lock()
        self.entries: Mapping[str, ModelEntry] = {}
        self.text_models: Mapping[str, TextStages] = {}
        self.scan_folders()

    def load(self, request: LoadRequest) -> None:
        """Load a model; does nothing if it is loaded and its folder has not changed.

        Raises:
            InferenceError: it cannot be loaded; the old versions keep answering.
        """
        self.scan_folders()
        try:
            with unexpected_as_failed(request.name):
                entry, upload = request.resolve(self.entries, options=self._options)
                self._load_with_steps(entry, is_override=bool(request.config_json), upload=upload)
        except GenserveError as error:
            _log_not_loaded(request.name, error)
            raise
        self._model(request.name).is_requested = True
        self._follow_steps()

    def load_noted(self, entry: ModelEntry) -> None:
        """Load a model; if that fails, record the error in `errors`."""
        with self._noting_errors(entry.name):
            self._load_with_steps(entry)
            self._model(entry.name).is_requested = True

    def unload(self, name: str, *, dependents: bool) -> None:
        """Begin to unload a model, and with `dependents` the models of its steps that nothing else needs."""
        if name not in self._models and not self._table.of(name):
            return      # nothing is kept of the names that clients invent
        steps = {step for served in self._table.of(name) for step in _steps(served)}
        model = self._model(name)
        model.is_requested = model.waits_for_steps = False
        model.override = None
        self._unload(name)
        if dependents:
            needed = {step for served in self._table.served for step in _steps(served)}
            for step in steps - needed:
                if not self._model(step).is_requested:
                    self._unload(step)
        self._follow_steps()

    def serve(self, name: str, fresh: Iterable[ModelVersion]) -> None:
        """Serve these versions of a model in place of the old ones, which finish what they have accepted."""
        self._unloader.unload(self._table.put(name, fresh), timeout_s=self._options.exit_timeout_s)

    def note_folders(self) -> None:
        """Record the fingerprints of all folders, which `follow_folders` compares."""
        for name, entry in self.entries.items():
            self._model(name).polled = self._fingerprint(entry)

    def follow_folders(self) -> bool:
        """Load new and changed models, unload removed ones.

        Files that somebody is still copying are not loaded: a folder that has changed must look the same at
        the next call.

        Returns:
            Whether folders have changed since the last call, so that this should be called again soon.
        """
        before = self.entries
        self.scan_folders()
        for name in before.keys() - self.entries.keys():
            self._unload(name)
            self._model(name).polled = None
        for name, entry in self.entries.items():
            if self._model(name).has_settled(self._fingerprint(entry)):
                self.load_noted(entry)
        self._follow_steps()
        return any(self._model(name).settling is not None for name in self.entries)

    def close(self) -> None:
        """Unload all models; blocks."""
        self._unloader.is_closing = True
        for name in dict.fromkeys(served.name for served in self._table.served):
            self._unload(name, timeout_s=0)
        self._unloader.join()

    def scan_folders(self) -> None:
        """Read the folders again; nothing is loaded or unloaded."""
        directory = self._options.backend_directory
        with self._scanning:    # a scan never replaces the result of a later one
            self.entries = scan(
                self._roots,
                config_name=self._options.config_name,
                backend_folders=[directory] if directory else (),
                strict_paths=self._options.strict_paths,
            )
            self.text_models = text_models(self.entries)

    def _model(self, name: str) -> _Model:
        return self._models.setdefault(name, _Model())

    def _follow_steps(self) -> None:
        """Unload the ensembles with a step that is not ready; load waiting ones whose steps all are.

        As in Triton. Not to be called with the lock of a model.
        """
        with self._following:
            while torn := self._table.torn_ensembles():
                for name in torn:
                    self._model(name).waits_for_steps = True
                    self._unload(name)
            while whole := [entry for entry in self._waiting() if self._table.has_steps(entry.config)]:
                for entry in whole:
                    model = self._model(entry.name)
                    model.waits_for_steps = False
                    with self._noting_errors(entry.name):
                        self._load_with_steps(entry, is_override=model.override is not None)

    def _waiting(self) -> list[ModelEntry]:
        """Return the ensembles that wait for their steps."""
        waiting = [(name, model) for name, model in list(self._models.items()) if model.waits_for_steps]
        found = [model.override or self.entries.get(name) for name, model in waiting]
        return [entry for entry in found if entry is not None]

    @contextmanager
    def _noting_errors(self, name: str) -> Iterator[None]:
        try:
            with unexpected_as_failed(name):
                yield
        except GenserveError as error:
            cause = error.__cause__  # names file and line
            self.errors[name] = cause if isinstance(cause, ConfigError) else error
            _log_not_loaded(name, self.errors[name])

    def _load_with_steps(
        self, requested: ModelEntry, *, is_override: bool = False, upload: Upload | None = None
    ) -> None:
        """Load a model; an ensemble after the models of its steps that are not ready.

        Args:
            requested: the model; a stage of a text model loads the text model.
            is_override: its config is that of a load request; the next one reads the folder again.
            upload: the folder of the files of the load request, if it has any.
        """
        asked_s = time.monotonic()
        owner = stage_owners(self.text_models).get(requested.name, requested.name)
        model = self._model(owner)
        with model.lock:
            if not is_override:     # the folder may have changed while this waited
                requested = self.entries.get(requested.name, requested)
            entries = {**self.entries, requested.name: requested}
            entry = entries.get(owner, requested)
            files, failed = self._fingerprint(entry), model.failed
            if not is_override and model.loaded == files and all(map(self._table.of, (owner, *model.stages))):
                return
            if not is_override and failed and failed.files == files and failed.ended_s > asked_s:
                raise failed.error      # of the same load, for which this one has waited
            try:
                self._replace(entry, requested, entries, is_override=is_override, upload=upload)
            except GenserveError as error:
                model.failed = _FailedLoad(files=files, ended_s=time.monotonic(), error=error)
                raise
            model.loaded = None if is_override else files

    def _replace(
        self,
        entry: ModelEntry,
        requested: ModelEntry,
        entries: Mapping[str, ModelEntry],
        *,
        is_override: bool,
        upload: Upload | None,
    ) -> None:
        """Load a model, whose lock is held, and unload the versions that it replaces."""
        started_s = time.monotonic()
        model = self._model(entry.name)
        for each in {requested.name: requested, entry.name: entry}.values():
            _reject_unusable(each, entries)
        is_text_model = entry.name in self.text_models
        _reject_broken(entry, entries, is_text_model=is_text_model, is_uploaded=upload is not None)
        if not is_text_model:
            self._load_missing_steps(entry)
        _reject_unfit(entry, entries)
        fresh = self._loader.load(entry, entries, upload=upload)
        if self._unloader.is_closing:
            for served in fresh:
                served.close(timeout_s=0)
            raise stopping()
        _return_free_memory()
        names = {served.name for served in fresh}
        for name in {entry.name, *model.stages} | names:
            self.serve(name, [served for served in fresh if served.name == name])
        model.stages = frozenset(names - {entry.name})
        _log_loaded(entry.name, fresh, seconds=time.monotonic() - started_s)
        model.override = None
        if is_override and requested.is_ensemble:
            self._model(requested.name).override = requested
        self.errors.pop(entry.name, None)

    def _load_missing_steps(self, entry: ModelEntry) -> None:
        """Load the models of an ensemble's steps that are not ready: all, even if one of them fails."""
        failures: list[tuple[ModelEntry, InferenceError]] = []
        for step in step_models(entry, self.entries):
            below = {step.name, *(model.name for model in all_step_models(step, self.entries))}
            if self._table.of(step.name) or entry.name in below:
                continue    # it is ready, or depends on the ensemble itself
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
            model.loaded = None
            self.errors.pop(name, None)

    def _fingerprint(self, entry: ModelEntry) -> object:
        """Return a value that changes with the files of a model and its stages, or the configs of steps."""
        stages = self.text_models.get(entry.name, {})
        steps = {model.name: model.parsed.message for model in step_models(entry, self.entries)}
        return [fingerprint(model.path) for model in (entry, *stages.values())], steps


class _Unloader:
    """Closes replaced versions on threads, once their requests have ended.

    Attributes:
        is_closing: the process is about to exit.
    """

    def __init__(self, table: ModelTable) -> None:
        self.is_closing = False
        self._table = table
        self._threads: dict[threading.Thread, None] = {}    # in the order of their start

    def unload(self, old: list[ModelVersion], *, timeout_s: float) -> None:
        """Close versions that are no longer in the table; does not block."""
        keys = [(served.name, served.version) for served in old]
        self._set_state(keys, ModelState.UNLOADING)
        started_s = time.monotonic()

        def close() -> None:
            while old:
                remaining_s = started_s + timeout_s - time.monotonic()
                old.pop().close(timeout_s=max(0.0, remaining_s))
            if not self.is_closing:
                gc.collect()  # a model's weights are often in a reference cycle with it
                _return_free_memory()
            self._set_state(keys, ModelState.UNAVAILABLE, reason="unloaded")
            text = ", ".join(f"{name} version {version}" for name, version in keys)
            logger.info("unloaded in %.1f s: %s", time.monotonic() - started_s, text)
            self._threads.pop(thread, None)

        if old:
            thread = threading.Thread(target=close, name=f"unload-{old[0].name}", daemon=True)
            self._threads[thread] = None
            thread.start()

    def join(self) -> None:
        """Wait until all versions are closed."""
        for thread in list(self._threads):
            thread.join()

    def _set_state(self, keys: Iterable[tuple[str, int]], state: ModelState, *, reason: str = "") -> None:
        """Set the state of versions, except those that another one has replaced."""
        for name, version in keys:
            if self._table.get(name, version) is None:
                self._table.set_state(name, version, state, reason=reason)


def _return_free_memory() -> None:
    """Return the C library's free memory to the system: 30 of 195 MB after a load of the default model."""
    trim = getattr(_C_LIBRARY, "malloc_trim", None)     # of glibc
    if trim is not None:
        trim(0)


def _log_loaded(name: str, fresh: Iterable[ModelVersion], *, seconds: float) -> None:
    versions = ", ".join(str(served.version) for served in fresh if served.name == name)
    logger.info("model %s version %s is ready, loaded in %.1f s", name, versions, seconds)


def _log_not_loaded(name: str, error: GenserveError) -> None:
    logger.error("model %s is not loaded: %s", name, error)


def _reject_unusable(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> None:
    """Reject a config that Triton rejects before it loads: the model gets no version in the index."""
    try:
        check_usable(entry, entries)
    except RepositoryError as error:
        raise not_polled(entry.name, remedy=str(error)) from error


def _reject_broken(
    entry: ModelEntry, entries: Mapping[str, ModelEntry], *, is_text_model: bool, is_uploaded: bool
) -> None:
    """Reject a load request that breaks a text model."""
    is_broken = is_text_model and not text_stages(entry, entries)
    in_engine = is_text_model or is_logits_stage(entry.config)
    if is_broken or (in_engine and is_uploaded):
        raise InferenceError(
            f"model '{entry.name}' runs in a text engine, which cannot be loaded like this",
            status=Status.UNSUPPORTED,
            remedy="change its files in the repository, or its config so that its three stages remain",
        )


def _reject_unfit(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> None:
    """Reject an ensemble that does not fit the models of its steps: it gets no version in the index."""
    error = first_error(ensemble_diagnostics(entry, entries))
    if error is not None:
        text = f"load failed for model '{entry.name}': {error.text}\n"
        raise InferenceError(text, remedy=str(error)) from error


def _steps(served: ModelVersion) -> list[str]:
    return [step.model_name for step in served.config.ensemble_steps]
