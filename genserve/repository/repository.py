"""Repository: the models there are, which of them answer, and the door to them."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from genserve.backends.ensemble import GenerationEnsemble
from genserve.config.fault import first_error
from genserve.errors import (
    Closed,
    ConfigError,
    GenserveError,
    InferenceError,
    ModelNotFound,
    ModelNotReady,
    RepositoryError,
    Status,
)
from genserve.inference import Inference
from genserve.metrics import Metrics
from genserve.repository.check import model_faults
from genserve.repository.index import ModelEntry, fingerprint, scan
from genserve.repository.loading import Loader
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.preparation import check_usable, prepare
from genserve.repository.response_cache import ResponseCache
from genserve.repository.served import Served
from genserve.repository.stages import (
    generation_models,
    is_logits_stage,
    load_generation,
    load_logits_stage,
    stage_owners,
)
from genserve.repository.text_generation import TextGeneration
from genserve.repository.versions import IndexEntry, ModelState, Versions
from genserve.schedulers.rate_limiter import RateLimiter

__all__ = ["Repository"]

logger = logging.getLogger(__name__)

_STATUS_WORDS = {
    Status.UNKNOWN: "Unknown",
    Status.INTERNAL: "Internal",
    Status.NOT_FOUND: "Not found",
    Status.INVALID_ARG: "Invalid argument",
    Status.UNAVAILABLE: "Unavailable",
    Status.UNSUPPORTED: "Unsupported",
    Status.ALREADY_EXISTS: "Already exists",
    Status.CANCELLED: "Cancelled",
}


class Repository:
    """All models of one or more folders; the `Door` for routes, ensembles and BLS.

    Loading and unloading happens one call at a time; everything is safe from any thread.
    """

    def __init__(
        self,
        roots: Iterable[Path],
        *,
        options: RepositoryOptions | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """Read the folders; nothing is loaded yet.

        Raises:
            RepositoryError: a root is not a folder.
        """
        self.options = options or RepositoryOptions()
        self._roots = tuple(roots)
        self._entries = self._scan()
        self._versions = Versions()
        cache_bytes = self.options.cache_bytes
        self._loader = Loader(
            door=self,
            versions=self._versions,
            options=self.options,
            metrics=metrics or Metrics(),
            cache=ResponseCache(size_bytes=cache_bytes) if cache_bytes else None,
            rate_limiter=RateLimiter(self.options.resources) if self.options.rate_limiter else None,
        )
        self._locks: dict[str, threading.RLock] = {}        # of each model: one change of it at a time
        self._errors: dict[str, GenserveError] = {}
        self._wanted: list[str] | None = None       # None: `start` has not been called
        self._asked: set[str] = set()               # what was loaded for its own sake, not as a step
        self._started = False
        self._fingerprints: dict[str, object] = {}          # of what is loaded
        self._polled: dict[str, object] = {}                # of what the last poll saw
        self._scratch: TemporaryDirectory[str] | None = None    # for the files that load calls bring
        self._numbers = itertools.count()
        self._retiring: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._poller: threading.Thread | None = None

    # What there is.

    @property
    def names(self) -> list[str]:
        """The generation models there are, loaded or not."""
        return generation_models(self._entries)

    @property
    def generation_models(self) -> list[GenerationEnsemble]:
        """The generation models that answer."""
        runners = (served.runner for served in self._versions.served)
        return [runner.ensemble for runner in runners if isinstance(runner, TextGeneration)]

    @property
    def served(self) -> list[Served]:
        """Every version of every model that answers."""
        return self._versions.served

    @property
    def live(self) -> bool:
        """Whether requests are taken at all."""
        return not self._closing.is_set()

    @property
    def ready(self) -> bool:
        """Whether every model that was to be loaded answers."""
        return self.state is ModelState.READY

    @property
    def errors(self) -> dict[str, GenserveError]:
        """Why a model that was to be loaded is not."""
        return dict(self._errors)

    @property
    def state(self) -> ModelState:
        """The worst of all models': UNAVAILABLE if a load failed or an engine died."""
        if self._errors or not all(served.runner.ready for served in self._versions.served):
            return ModelState.UNAVAILABLE
        return ModelState.READY if self._started else ModelState.LOADING

    def index(self, *, ready_only: bool = False) -> list[IndexEntry]:
        """Return a line for each version, and one for each model that was never loaded; by name."""
        known = self._versions.index()
        if ready_only:
            return [entry for entry in known if entry.state is ModelState.READY]
        names = {entry.name for entry in known}
        untouched = [IndexEntry(name=name) for name in self._entries if name not in names]
        listed = [entry for entry in known if entry.name in self._entries]  # not what came with a load call
        return sorted([*listed, *untouched], key=lambda entry: (entry.name, entry.version or 0))

    def versions(self, name: str) -> list[int]:
        """Return the versions of a model that answer, ascending."""
        return [served.version for served in self._versions.of(name)]

    def find(self, name: str, version: int = -1) -> Served:
        """Return a version of a model; -1: the highest that answers.

        Raises:
            InferenceError: there is none, with Triton's text.
        """
        return self._versions.find(name, version)

    def get(self, name: str | None = None) -> GenerationEnsemble:
        """Return a generation model; without a name, the only one.

        Raises:
            ModelNotFound: there is none of this name, or no name and several models.
            ModelNotReady: it is loading, or its load failed.
        """
        if name is None:
            name = self.only_name()
        for model in self.generation_models:
            if model.name == name:
                return model
        if name not in self._entries:
            raise self._not_found(name)
        if self._versions.of(name):
            known = ", ".join(self.names) or "none"
            raise ModelNotFound(
                f"model {name!r} does not generate text", remedy=f"models that do: {known}", field="model"
            )
        states = self._versions.states(name)
        state = states[-1].state.lower() if states and states[-1].state else "not loaded"
        if name in self._errors:
            state = "unavailable"
        raise ModelNotReady(f"model {name!r} is {state}", remedy="the server's log has the reason")

    def only_name(self) -> str:
        """Return the name of the only generation model: of those to be loaded, or else of all there are.

        Raises:
            ModelNotFound: there is not exactly one.
        """
        names = [name for name in self.names if self._wanted is None or name in self._wanted]
        if len(names) != 1:
            raise ModelNotFound(
                "no model is named, and there is not exactly one",
                remedy=f"name one of: {', '.join(names) or 'none is there'}",
                field="model",
            )
        return names[0]

    # The door.

    def submit(self, inference: Inference) -> None:
        """Run an inference; see `Door`."""
        request = inference.request
        refused: Served | None = None
        while True:
            served = self._versions.find(request.model_name, request.model_version)
            if served is refused:
                text = f"Request for unknown model: '{request.model_name}' has no available versions"
                raise InferenceError(text, status=Status.NOT_FOUND)
            try:
                served.submit(inference)
            except Closed:
                refused = served  # it is being replaced: the one in its place takes the request
            else:
                return

    def is_ready(self, name: str, version: int = -1) -> bool:
        """Whether a model answers."""
        try:
            return self._versions.find(name, version).ready
        except InferenceError:
            return False

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        """Whether a model gives any number of responses."""
        return self._versions.find(name, version).config.decoupled

    def load(self, name: str, *, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load a model, or load it anew if its folder has changed; see `Door`."""
        if self.options.control_mode is not ControlMode.EXPLICIT:
            raise _not_explicit()
        self._entries = self._scan()
        entry = self._entry_of_files(name, files, config) if files else self._entries.get(name)
        if entry is None:
            raise _not_polled(name, remedy="there is no folder of this name in the repository")
        self._asked.add(name)
        self._load_with_steps(entry, config_json=config, again=bool(config or files))

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """Begin to unload a model; one that is not loaded is fine; see `Door`."""
        if self.options.control_mode is not ControlMode.EXPLICIT:
            raise _not_explicit()
        steps = {step for served in self._versions.of(name) for step in _steps(served)}
        self._asked.discard(name)
        self._unload(name)
        if dependents:
            needed = {step for served in self._versions.served for step in _steps(served)}
            for step in steps - needed - self._asked:
                self._unload(step)

    # Its life.

    def start(self, names: Iterable[str] | None = None) -> None:
        """Load these models; one that fails is noted in `errors` and passed over. None: all there are.

        Raises:
            ModelNotFound: one of `names` is not in the repository.
        """
        asked = list(self._entries if names is None else names)
        for name in asked:
            if name not in self._entries:
                raise self._not_found(name)
        self._wanted = asked
        self._asked.update(asked)
        owners = stage_owners(self._entries)
        entries = [self._entries[name] for name in self._wanted]
        alone = [entry for entry in entries if not entry.is_ensemble and entry.name not in owners]
        with ThreadPoolExecutor(self.options.load_threads, thread_name_prefix="load") as pool:
            for future in [pool.submit(self._load_noted, entry) for entry in alone]:
                future.result()
        for entry in entries:
            if entry not in alone:
                self._load_noted(entry)
        self._started = True
        self._polled = {name: fingerprint(entry.path) for name, entry in self._entries.items()}
        if self.options.control_mode is ControlMode.POLL:
            self._poller = threading.Thread(target=self._poll, name="repository-poll", daemon=True)
            self._poller.start()

    def close(self) -> None:
        """Unload everything; a second call does nothing."""
        self._closing.set()
        if self._poller is not None:
            self._poller.join()
        for name in dict.fromkeys(served.name for served in self._versions.served):
            self._unload(name, timeout_s=0)
        for thread in list(self._retiring):
            thread.join()
        if self._scratch is not None:
            self._scratch.cleanup()

    # Loading.

    def _load_noted(self, entry: ModelEntry) -> None:
        try:
            self._load_with_steps(entry)
        except GenserveError as error:
            cause = error.__cause__  # names file and line
            self._errors[entry.name] = cause if isinstance(cause, ConfigError) else error

    def _load_with_steps(self, entry: ModelEntry, *, config_json: str = "", again: bool = False) -> None:
        """Load a model; an ensemble after those of its steps that do not answer yet."""
        entry = self._entries.get(stage_owners(self._entries).get(entry.name, ""), entry)
        found = fingerprint(entry.path)
        with self._lock_of(entry.name):
            if not again and self._fingerprints.get(entry.name) == found and self._versions.of(entry.name):
                return
            self._refuse_unusable(entry, config_json)
            if entry.name in self.names:
                fresh = self._load_or_note(entry, lambda: self._load_generation(entry))
            elif is_logits_stage(entry):
                fresh = self._load_or_note(entry, lambda: [self._load_logits_stage(entry)])
            else:
                for step in self._missing_steps(entry):
                    self._load_with_steps(step)
                fresh = self._load_or_note(entry, lambda: self._load_versions(entry, config_json))
            for name in dict.fromkeys(served.name for served in fresh):
                old = self._versions.put(name, [served for served in fresh if served.name == name])
                self._retire(old, timeout_s=self.options.exit_timeout_s)
            # A config of the call holds until the next one: that reads the folder again.
            self._fingerprints[entry.name] = None if config_json else found
            self._errors.pop(entry.name, None)

    def _missing_steps(self, entry: ModelEntry) -> Iterator[ModelEntry]:
        for step in entry.config.ensemble_steps if entry.config else ():
            if not self._versions.of(step.model_name) and step.model_name in self._entries:
                yield self._entries[step.model_name]

    def _refuse_unusable(self, entry: ModelEntry, config_json: str) -> None:
        """Refuse a config that Triton does not even take up: the model gets no version in the index."""
        try:
            check_usable(entry, self._entries, options=self.options, config_json=config_json)
        except RepositoryError as error:
            raise _not_polled(entry.name, remedy=str(error)) from error

    def _load_or_note(self, entry: ModelEntry, load: Callable[[], list[Served]]) -> list[Served]:
        """Run a load; if it fails, what served before goes on, and the index says why."""
        version = (entry.versions or (1,))[-1]
        serves = bool(self._versions.of(entry.name))
        if not serves:
            self._versions.set_state(entry.name, version, ModelState.LOADING)
        try:
            return load()
        except Exception as error:
            if not isinstance(error, GenserveError):
                logger.exception("model %s failed to load", entry.name)
            reason = _reason(error)
            if not serves:
                self._versions.set_state(entry.name, version, ModelState.UNAVAILABLE, reason=reason)
            text = f"version {version} is at UNAVAILABLE state: {reason};\n"
            remedy = str(error) if isinstance(error, ConfigError) else getattr(error, "remedy", "")
            raise InferenceError(f"load failed for model '{entry.name}': {text}", remedy=remedy) from error

    def _load_versions(self, entry: ModelEntry, config_json: str) -> list[Served]:
        if not config_json:
            # Not the config's own faults: `prepare` judges it once it is completed.
            faults = model_faults(entry, self._entries)
            error = first_error(fault for fault in faults if fault not in entry.parsed.faults)
            if error is not None:
                raise error
        model = prepare(entry, self._entries, options=self.options, config_json=config_json)
        fresh: list[Served] = []
        try:
            for version in model.versions:
                fresh.append(self._loader.load(model, version))
        except BaseException:
            for served in fresh:
                served.close(timeout_s=0)
            raise
        return fresh

    def _load_generation(self, entry: ModelEntry) -> list[Served]:
        return load_generation(
            entry, self._entries, max_queue=self.options.max_queue, metrics=self._loader.metrics
        )

    def _load_logits_stage(self, entry: ModelEntry) -> Served:
        return load_logits_stage(entry, max_queue=self.options.max_queue, metrics=self._loader.metrics)

    def _entry_of_files(self, name: str, files: Mapping[str, bytes], config: str) -> ModelEntry:
        """Write the files of a load call into a folder of their own, which takes the place of the model's."""
        if not config:
            raise _not_polled(name, remedy="send the model's config as JSON along with its files")
        self._scratch = self._scratch or TemporaryDirectory(prefix="genserve-")
        root = Path(self._scratch.name) / str(next(self._numbers))
        for path, content in files.items():
            target = (root / name / path.removeprefix("file:")).resolve()
            if not target.is_relative_to(root.resolve() / name):
                raise InferenceError(f"the file {path!r} would lie outside of the model's folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return scan([root])[name]

    # Unloading.

    def _unload(self, name: str, *, timeout_s: float | None = None) -> None:
        with self._lock_of(name):
            owners = stage_owners(self._entries)
            for model in (name, *(stage for stage, owner in owners.items() if owner == name)):
                self._retire(self._versions.put(model, ()), timeout_s=timeout_s)
            self._fingerprints.pop(name, None)

    def _retire(self, old: list[Served], *, timeout_s: float | None) -> None:
        """Let versions that nobody can find any more end their requests, on a thread, and close them."""
        keys = [(served.name, served.version) for served in old]
        self._note_gone(keys, ModelState.UNLOADING)

        def close() -> None:
            while old:
                old.pop().close(timeout_s=self.options.exit_timeout_s if timeout_s is None else timeout_s)
            if self.live:
                gc.collect()  # a model's weights are often in a cycle with it
            self._note_gone(keys, ModelState.UNAVAILABLE, reason="unloaded")
            self._retiring.discard(thread)

        if old:
            thread = threading.Thread(target=close, name=f"unload-{old[0].name}", daemon=True)
            self._retiring.add(thread)
            thread.start()

    def _note_gone(self, keys: Iterable[tuple[str, int]], state: ModelState, *, reason: str = "") -> None:
        """Note where versions stand, but for those in whose place another answers."""
        for name, version in keys:
            if version not in self.versions(name):
                self._versions.set_state(name, version, state, reason=reason)

    def _poll(self) -> None:
        """Follow the folders until the repository closes."""
        while not self._closing.wait(self.options.poll_s):
            try:
                self._follow_folders()
            except Exception:
                logger.exception("polling the repository failed")

    def _follow_folders(self) -> None:
        before, self._entries = self._entries, self._scan()
        for name in before.keys() - self._entries.keys():
            self._unload(name)
        for name, entry in self._entries.items():
            if fingerprint(entry.path) != self._polled.get(name):
                self._polled[name] = fingerprint(entry.path)
                self._load_noted(entry)

    def _scan(self) -> dict[str, ModelEntry]:
        directory = self.options.backend_directory
        return scan(
            self._roots,
            config_name=self.options.config_name,
            backend_folders=[directory] if directory else (),
        )

    def _lock_of(self, name: str) -> threading.RLock:
        return self._locks.setdefault(name, threading.RLock())

    def _not_found(self, name: str) -> ModelNotFound:
        roots = ", ".join(str(root) for root in self._roots)
        known = ", ".join(self.names) or "none"
        return ModelNotFound(
            f"there is no model {name!r}", remedy=f"models in {roots}: {known}", field="model"
        )


def _reason(error: Exception) -> str:
    """Return why a load failed, in Triton's form: its word for the code, and the message."""
    if isinstance(error, InferenceError | RepositoryError):
        text = error.text if isinstance(error, ConfigError) else error.message
        return f"{_STATUS_WORDS[error.status]}: {text}"
    if isinstance(error, GenserveError):
        return f"Internal: {error.message}"
    return f"Internal: {type(error).__name__}: {error}"


def _steps(served: Served) -> list[str]:
    return [step.model_name for step in served.config.ensemble_steps]


def _not_polled(name: str, *, remedy: str) -> InferenceError:
    text = f"failed to load '{name}', failed to poll from model repository"
    return InferenceError(text, status=Status.INTERNAL, remedy=remedy)


def _not_explicit() -> InferenceError:
    return InferenceError(
        "explicit model load / unload is not allowed if polling is enabled",
        status=Status.UNAVAILABLE,
        remedy="start the server with --model-control-mode explicit",
    )
