"""Model lifecycle: loads, replaces and unloads models; why a load failed, in Triton's words."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from genserve.config.diagnostics import first_error
from genserve.config.model_config import ModelConfig
from genserve.errors import ConfigError, GenserveError, InferenceError, RepositoryError, Status
from genserve.repository.config_resolution import check_usable, with_config
from genserve.repository.ensemble_rules import ensemble_diagnostics
from genserve.repository.ensemble_steps import (
    TextStages,
    all_step_models,
    stage_owners,
    step_models,
    text_models,
    text_stages,
)
from genserve.repository.index import ModelEntry, fingerprint, scan
from genserve.repository.model_loader import ModelLoader, VersionFailed
from genserve.repository.model_versions import ModelState, ModelTable, ModelVersion
from genserve.repository.options import RepositoryOptions
from genserve.repository.upload import Upload, refuse_code
from genserve.textmodel.logits_config import is_logits_stage

__all__ = ["ModelLifecycle", "load_error", "not_polled", "reason", "without_step"]


logger = logging.getLogger(__name__)

_STATUS_WORDS: Mapping[Status, str] = {
    Status.UNKNOWN: "Unknown",
    Status.INTERNAL: "Internal",
    Status.NOT_FOUND: "Not found",
    Status.INVALID_ARG: "Invalid argument",
    Status.UNAVAILABLE: "Unavailable",
    Status.UNSUPPORTED: "Unsupported",
    Status.ALREADY_EXISTS: "Already exists",
    Status.CANCELLED: "Cancelled",
}


def load_error(name: str, failed: VersionFailed) -> InferenceError:
    """Return what whoever asked for a model is told of a version that failed; log what is not ours."""
    error = failed.error
    if not isinstance(error, GenserveError):
        logger.error("model %s failed to load", name, exc_info=error)
    text = f"version {failed.version} is at UNAVAILABLE state: {reason(error)};\n"
    remedy = str(error) if isinstance(error, ConfigError) else getattr(error, "remedy", "")
    return InferenceError(f"load failed for model '{name}': {text}", remedy=remedy)


def reason(error: Exception) -> str:
    """Return why a load failed, in Triton's form: its word for the code, and the message."""
    if isinstance(error, InferenceError | RepositoryError):
        text = error.text if isinstance(error, ConfigError) else error.message
        return f"{_STATUS_WORDS[error.status]}: {text}"
    if isinstance(error, GenserveError):
        return f"Internal: {error.message}"
    return f"Internal: {type(error).__name__}: {error}"


def without_step(ensemble: str, step: ModelEntry, error: InferenceError) -> str:
    """Return why an ensemble cannot be loaded, in Triton's words: the model of a step was not."""
    start = f"load failed for model '{step.name}': "
    if not error.message.startswith(start):     # it was not even taken up
        return f"ensemble {ensemble} contains models that are not available or ambiguous: {step.name}\n"
    what = "is not valid. Model '{}'" if step.is_ensemble else "has no loaded version. Model '{}' loading"
    return (
        f"ensemble '{ensemble}' depends on '{step.name}' which {what.format(step.name)} failed with error: "
        f"{error.message.removeprefix(start)}"
    )


def not_polled(name: str, *, remedy: str) -> InferenceError:
    """Return what whoever asked for a model is told that was not even taken up."""
    text = f"failed to load '{name}', failed to poll from model repository"
    return InferenceError(text, status=Status.INTERNAL, remedy=remedy)





class ModelLifecycle:
    """Loads and unloads; a model is changed by one call at a time, whoever calls.

    Attributes:
        entries: the folders as they were seen last; replaced, never changed.
        text_models: the text models among them, with their stages.
        errors: why a model that was to be loaded at the start, or since by polling, is not.
    """

    def __init__(
        self, roots: Iterable[Path], *, options: RepositoryOptions, versions: ModelTable, loader: ModelLoader
    ) -> None:
        """Read the folders; nothing is loaded yet.

        Raises:
            RepositoryError: a root is not a folder.
        """
        self.errors: dict[str, GenserveError] = {}
        self._roots = tuple(roots)
        self._options = options
        self._versions = versions
        self._loader = loader
        self._locks: dict[str, threading.RLock] = {}    # of each model
        self._asked: set[str] = set()                   # what was loaded for its own sake, not as a step
        self._away: set[str] = set()                    # ensembles that come once all of their steps answer
        self._brought_ensembles: dict[str, ModelEntry] = {}  # with the config that a load call brought
        self._following = threading.Lock()
        self._brought: dict[str, set[str]] = {}         # stages that answer too, by their ensemble
        self._traces: dict[str, object] = {}            # of the folders of what is loaded
        self._polled: dict[str, object] = {}            # of all folders, as the last poll saw them
        self._retiring: set[threading.Thread] = set()
        self._closed = False
        self.entries: Mapping[str, ModelEntry] = {}
        self.text_models: Mapping[str, TextStages] = {}
        self.rescan()

    def rescan(self) -> None:
        """Read the folders again."""
        directory = self._options.backend_directory
        self.entries = scan(
            self._roots,
            config_name=self._options.config_name,
            backend_folders=[directory] if directory else (),
            strict_paths=self._options.strict_paths,
        )
        self.text_models = text_models(self.entries)

    def load(
        self, name: str, *, config_json: str, files: Mapping[str, bytes] | None, allow_code: bool
    ) -> None:
        """Load a model, or load it anew if its folder has changed.

        Args:
            name: of the model.
            config_json: in place of its config; empty: its own.
            files: in place of its folder; None: its own.
            allow_code: whether config and files may lead to code being run that the repository does not hold.

        Raises:
            InferenceError: it cannot be loaded; what served before goes on.
        """
        self.rescan()
        try:
            entry, upload = self._entry_to_load(name, config_json, files, allow_code=allow_code)
            self._load_with_steps(entry, is_brought=bool(config_json), upload=upload)
        except GenserveError as error:
            _log_not_loaded(name, error)
            raise
        self._asked.add(name)
        self._follow_steps()

    def _entry_to_load(
        self, name: str, config_json: str, files: Mapping[str, bytes] | None, *, allow_code: bool
    ) -> tuple[ModelEntry, Upload | None]:
        """Return the model that a load call means, and the folder of the files that came with it."""
        if files:
            if not config_json:
                raise not_polled(name, remedy="send the model's config as JSON along with its files")
            upload = Upload(name, files)
            entry: ModelEntry | None = scan([upload.root])[name]
        else:
            upload, entry = None, self.entries.get(name)
        if entry is None:
            raise not_polled(name, remedy="there is no folder of this name in the repository")
        if config_json:
            try:
                entry = with_config(entry, config_json, options=self._options)
                if not allow_code:
                    refuse_code(entry, is_uploaded=upload is not None)
            except RepositoryError as error:
                raise not_polled(name, remedy=str(error)) from error
        return entry, upload

    def load_noted(self, entry: ModelEntry) -> None:
        """Load a model; if it fails, note it in `errors`."""
        with self._noting_errors(entry.name):
            self._load_with_steps(entry)
            self._asked.add(entry.name)

    def unload(self, name: str, *, dependents: bool) -> None:
        """Begin to unload a model, and with `dependents` the steps that nothing else needs."""
        steps = {step for served in self._versions.of(name) for step in _steps(served)}
        self._asked.discard(name)
        self._away.discard(name)
        self._brought_ensembles.pop(name, None)
        self._unload(name)
        if dependents:
            needed = {step for served in self._versions.served for step in _steps(served)}
            for step in steps - needed - self._asked:
                self._unload(step)
        self._follow_steps()

    def note_folders(self) -> None:
        """Remember how the folders are now: what changes from here on, `follow_folders` follows."""
        self._polled = {name: self._trace(entry) for name, entry in self.entries.items()}

    def follow_folders(self) -> None:
        """Load what is new or has changed, unload what is gone."""
        before = self.entries
        self.rescan()
        for name in before.keys() - self.entries.keys():
            self._unload(name)
            self._polled.pop(name, None)
        for name, entry in self.entries.items():
            trace = self._trace(entry)
            if trace != self._polled.get(name):
                self._polled[name] = trace
                self.load_noted(entry)
                if name in self.errors:
                    logger.error("%s", self.errors[name])
        self._follow_steps()

    def close(self) -> None:
        """Unload everything, and wait for it."""
        self._closed = True
        for name in dict.fromkeys(served.name for served in self._versions.served):
            self._unload(name, timeout_s=0)
        for thread in list(self._retiring):
            thread.join()

    def _follow_steps(self) -> None:
        """Unload the ensembles of which a step's model does not answer, and load those away of which all do.

        As Triton does. Not to be called with the lock of a model.
        """
        with self._following:
            while torn := [served.name for served in self._graphs() if not self._all_answer(served.config)]:
                self._away.update(torn)
                for name in torn:
                    self._unload(name)
            while whole := [entry for entry in self._entries_away() if self._all_answer(entry.config)]:
                for entry in whole:
                    self._away.discard(entry.name)
                    with self._noting_errors(entry.name):
                        self._load_with_steps(entry, is_brought=entry.name in self._brought_ensembles)

    def _graphs(self) -> list[ModelVersion]:
        served = self._versions.served
        return [each for each in served if each.config.ensemble_steps and each.text_model is None]

    def _entries_away(self) -> list[ModelEntry]:
        entries = {**self.entries, **self._brought_ensembles}
        return [entry for name, entry in entries.items() if name in self._away]

    def _all_answer(self, config: ModelConfig | None) -> bool:
        """Whether the models of all steps do."""
        steps = config.ensemble_steps if config else ()
        return all(self._versions.get(step.model_name, step.model_version) for step in steps)

    @contextmanager
    def _noting_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except GenserveError as error:
            cause = error.__cause__  # names file and line
            self.errors[name] = cause if isinstance(cause, ConfigError) else error
            _log_not_loaded(name, self.errors[name])

    def _load_with_steps(
        self, asked: ModelEntry, *, is_brought: bool = False, upload: Upload | None = None
    ) -> None:
        """Load a model; an ensemble after those of its steps that do not answer yet.

        Args:
            asked: the model; if it is a stage of a generation model, that is loaded.
            is_brought: whether its config came with the call; the next call reads the folder again.
            upload: the folder that it is from, if its files came with the call too.
        """
        entries = {**self.entries, asked.name: asked}
        entry = entries.get(stage_owners(self.text_models).get(asked.name, ""), asked)
        trace = self._trace(entry)
        started_s = time.monotonic()
        with self._lock_of(entry.name):
            together = (entry.name, *self._brought.get(entry.name, ()))
            is_as_loaded = self._traces.get(entry.name) == trace and all(map(self._versions.of, together))
            if is_as_loaded and not is_brought:
                return
            for model in {asked.name: asked, entry.name: entry}.values():
                _refuse_unusable(model, entries)
            self._check_loadable(entry, entries, is_uploaded=upload is not None)
            fresh = self._load_or_note(entry, entries, upload)
            names = {served.name for served in fresh}
            for name in {*together, *names}:
                old = self._versions.put(name, [served for served in fresh if served.name == name])
                self._retire(old, timeout_s=self._options.exit_timeout_s)
            self._brought[entry.name] = names - {entry.name}
            _log_loaded(entry.name, fresh, seconds=time.monotonic() - started_s)
            self._traces[entry.name] = None if is_brought else trace
            self._brought_ensembles.pop(entry.name, None)
            if is_brought and asked.is_ensemble:
                self._brought_ensembles[asked.name] = asked
            self.errors.pop(entry.name, None)

    def _check_loadable(
        self, entry: ModelEntry, entries: Mapping[str, ModelEntry], *, is_uploaded: bool
    ) -> None:
        """Refuse a text model that a load request breaks; load what the steps of another ensemble need."""
        in_engine = entry.name in self.text_models or is_logits_stage(entry.config)
        is_broken = entry.name in self.text_models and not text_stages(entry, entries)
        if is_broken or (in_engine and is_uploaded):
            raise InferenceError(
                f"model '{entry.name}' runs in a text engine, which cannot be loaded like this",
                status=Status.UNSUPPORTED,
                remedy="change its files in the repository, or its config so that its three stages remain",
            )
        if entry.name not in self.text_models:
            self._load_missing_steps(entry)
        _refuse_unfit(entry, entries)

    def _load_missing_steps(self, entry: ModelEntry) -> None:
        """Load the models of an ensemble's steps that do not answer: all, even if one of them fails."""
        failures: list[tuple[ModelEntry, InferenceError]] = []
        for step in self._missing_steps(entry):
            try:
                self._load_with_steps(step)
            except InferenceError as error:
                failures.append((step, error))
        if failures:
            self._away.add(entry.name)
            step, failure = failures[0]
            text = f"load failed for model '{entry.name}': {without_step(entry.name, step, failure)}"
            raise InferenceError(text, remedy=failure.remedy) from (failure.__cause__ or failure)

    def _missing_steps(self, entry: ModelEntry) -> Iterator[ModelEntry]:
        """Yield those models of steps that do not answer, but for the ones that lead back to the ensemble."""
        for step in step_models(entry, self.entries):
            below = {step.name, *(model.name for model in all_step_models(step, self.entries))}
            if not self._versions.of(step.name) and entry.name not in below:
                yield step

    def _load_or_note(
        self, entry: ModelEntry, entries: Mapping[str, ModelEntry], upload: Upload | None
    ) -> list[ModelVersion]:
        """Load a model; if that fails, the old versions keep answering, and the index has the reason."""
        version = (entry.versions or (1,))[-1]
        serves = bool(self._versions.of(entry.name))
        if not serves:
            self._versions.set_state(entry.name, version, ModelState.LOADING)
        try:
            return self._loader.load(entry, entries, upload=upload)
        except Exception as error:
            failed = error if isinstance(error, VersionFailed) else VersionFailed(error, version=version)
        if not serves:
            self._versions.set_state(
                entry.name, failed.version, ModelState.UNAVAILABLE, reason=reason(failed.error)
            )
            for other in failed.others:
                self._versions.set_state(entry.name, other, ModelState.UNAVAILABLE, reason="unloaded")
        raise load_error(entry.name, failed) from failed.error

    def _unload(self, name: str, *, timeout_s: float | None = None) -> None:
        with self._lock_of(name):
            for model in (name, *self._brought.pop(name, ())):
                self._retire(self._versions.put(model, ()), timeout_s=timeout_s)
            self._traces.pop(name, None)
            self.errors.pop(name, None)

    def _retire(self, old: list[ModelVersion], *, timeout_s: float | None) -> None:
        """Let versions that nobody can find any more end their requests, on a thread, and close them."""
        keys = [(served.name, served.version) for served in old]
        self._note_gone(keys, ModelState.UNLOADING)

        started_s = time.monotonic()

        def close() -> None:
            until_s = time.monotonic() + (self._options.exit_timeout_s if timeout_s is None else timeout_s)
            while old:
                served = old.pop()
                served.close(timeout_s=max(0.0, until_s - time.monotonic()))
            if not self._closed:
                gc.collect()  # a model's weights are often in a cycle with it
            self._note_gone(keys, ModelState.UNAVAILABLE, reason="unloaded")
            text = ", ".join(f"{name} version {version}" for name, version in keys)
            logger.info("unloaded in %.1f s: %s", time.monotonic() - started_s, text)
            self._retiring.discard(thread)

        if old:
            thread = threading.Thread(target=close, name=f"unload-{old[0].name}", daemon=True)
            self._retiring.add(thread)
            thread.start()

    def _note_gone(self, keys: Iterable[tuple[str, int]], state: ModelState, *, reason: str = "") -> None:
        """Note where versions stand, but for those in whose place another answers."""
        for name, version in keys:
            if version not in [served.version for served in self._versions.of(name)]:
                self._versions.set_state(name, version, state, reason=reason)

    def _trace(self, entry: ModelEntry) -> object:
        """Return what changes when a model's files do; those of its stages are a generation model's too.

        Of the steps of an ensemble, the configs: with them it may begin to fit, or fit no more.
        """
        stages = self.text_models.get(entry.name, {})
        steps = {model.name: model.parsed.message for model in step_models(entry, self.entries)}
        return [fingerprint(model.path) for model in (entry, *stages.values())], steps

    def _lock_of(self, name: str) -> threading.RLock:
        return self._locks.setdefault(name, threading.RLock())


def _log_loaded(name: str, fresh: Iterable[ModelVersion], *, seconds: float) -> None:
    versions = ", ".join(str(served.version) for served in fresh if served.name == name)
    logger.info("model %s version %s is ready, loaded in %.1f s", name, versions, seconds)


def _log_not_loaded(name: str, error: GenserveError) -> None:
    logger.error("model %s is not loaded: %s", name, error)


def _refuse_unusable(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> None:
    """Refuse a config that Triton does not even take up: the model gets no version in the index."""
    try:
        check_usable(entry, entries)
    except RepositoryError as error:
        raise not_polled(entry.name, remedy=str(error)) from error


def _refuse_unfit(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> None:
    """Refuse an ensemble that does not fit the models of its steps: it gets no version in the index."""
    error = first_error(ensemble_diagnostics(entry, entries))
    if error is not None:
        text = f"load failed for model '{entry.name}': {error.text}\n"
        raise InferenceError(text, remedy=str(error)) from error


def _steps(served: ModelVersion) -> list[str]:
    return [step.model_name for step in served.config.ensemble_steps]
