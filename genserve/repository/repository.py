"""Repository: all models of a server: loads them, and submits requests to them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from genserve.backends.onnx_session import ExternalWeights
from genserve.errors import (
    Closed,
    GenserveError,
    InferenceError,
    ModelNotFound,
    ModelNotReady,
    Status,
    closest,
)
from genserve.generation_metrics import Metrics
from genserve.inference import Inference
from genserve.log import note_change
from genserve.repository.index import ModelEntry
from genserve.repository.load_errors import stopping
from genserve.repository.load_request import LoadRequest
from genserve.repository.model_lifecycle import ModelLifecycle
from genserve.repository.model_loader import ModelLoader
from genserve.repository.model_versions import IndexEntry, ModelState, ModelTable, ModelVersion
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.response_cache import ResponseCache
from genserve.repository.text_stages import TextStages, stage_owners
from genserve.schedulers.rate_limiter import RateLimiter
from genserve.textmodel.text_model import TextModel

logger = logging.getLogger(__name__)

_SETTLE_S = 1.0     # files that have not changed for this long are complete
_MAX_SHOWN = 128    # characters of an unknown name in an error: a client may send any text


class Repository:
    """All models of one or more folders; the `InferenceServer` of routes, ensembles and BLS.

    Safe from any thread; a model is loaded or unloaded by one call at a time.
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
        self._table = ModelTable()
        cache_bytes = self.options.cache_bytes
        loader = ModelLoader(
            server=self,
            table=self._table,
            options=self.options,
            metrics=metrics or Metrics(),
            cache=ResponseCache(size_bytes=cache_bytes) if cache_bytes else None,
            rate_limiter=RateLimiter(self.options.resources) if self.options.rate_limiter else None,
        )
        self._lifecycle = ModelLifecycle(
            roots, options=self.options, table=self._table, loader=loader
        )
        self._wanted: list[str] | None = None       # None: `start` has not been called
        self._started = self._stopping = False
        self._closing = threading.Event()
        self._poller: threading.Thread | None = None

    # Models.

    @property
    def text_model_names(self) -> list[str]:
        """The names of all text models, loaded or not."""
        return list(self._lifecycle.text_models)

    @property
    def text_models(self) -> list[TextModel]:
        """The text models that answer."""
        return [served.text_model for served in self._table.served if served.text_model is not None]

    @property
    def served(self) -> list[ModelVersion]:
        """All versions of all models that answer."""
        return self._table.served

    @property
    def errors(self) -> dict[str, GenserveError]:
        """The errors of models that could not be loaded."""
        return dict(self._lifecycle.errors)

    @property
    def state(self) -> ModelState:
        """LOADING until `start` has tried to load all, UNAVAILABLE if a load failed or an engine died."""
        if not self._started:
            return ModelState.LOADING
        is_ready = not self._lifecycle.errors and all(served.runtime.ready for served in self._table.served)
        return ModelState.READY if is_ready else ModelState.UNAVAILABLE

    def index(self, *, ready_only: bool = False) -> list[IndexEntry]:
        """Return an entry for each version and for each model that was never loaded, by name."""
        known = self._table.index()
        if ready_only:
            return [entry for entry in known if entry.state is ModelState.READY]
        names = {entry.name for entry in known}
        entries = self._lifecycle.entries
        errors = self._lifecycle.errors
        untouched = [
            _unloaded(entry, errors.get(name) or entry.error)
            for name, entry in entries.items()
            if name not in names
        ]
        # Without models that only a load request had.
        listed = [entry for entry in known if entry.name in entries]
        return sorted([*listed, *untouched], key=lambda entry: (entry.name, entry.version or 0))

    def versions(self, name: str) -> list[int]:
        """Return the versions of a model that answer, ascending."""
        return [served.version for served in self._table.of(name)]

    def find(self, name: str, version: int = -1) -> ModelVersion:
        """Return a version of a model; -1: the highest that answers.

        Raises:
            InferenceError: there is none, with Triton's text.
        """
        return self._table.find(name, version)

    def text_model(self, name: str | None = None) -> TextModel:
        """Return a text model; without a name, the only one.

        Raises:
            ModelNotFound: an unknown name, or no name and not exactly one model.
            ModelNotReady: it is loading, or could not be loaded.
        """
        if name is None:
            name = self.only_text_model_name()
        served = self._table.get(name)
        if served is not None and served.text_model is not None:
            return served.text_model
        if name not in self._lifecycle.entries:
            raise _not_found(name, self.text_model_names)
        if served is not None:
            known = ", ".join(self.text_model_names) or "none"
            raise ModelNotFound(
                f"model {name!r} does not generate text", remedy=f"models that do: {known}", field="model"
            )
        states = self._table.states(name)
        state = states[-1].state.lower() if states and states[-1].state else "not loaded"
        if name in self._lifecycle.errors:
            state = "unavailable"
        raise ModelNotReady(f"model {name!r} is {state}", remedy="the server's log has the reason")

    def only_text_model_name(self) -> str:
        """Return the name of the only text model: of those to be loaded, or of all.

        Raises:
            ModelNotFound: there is not exactly one.
        """
        names = [name for name in self.text_model_names if self._wanted is None or name in self._wanted]
        if len(names) != 1:
            raise ModelNotFound(
                f"the request names no model, and this server has {len(names)}",
                remedy=f"set `model` to one of: {', '.join(names)}" if names else "load a text model first",
                field="model",
            )
        return names[0]

    def text_stages(self, name: str) -> TextStages | None:
        """Return the stages of a text model, by role; None: the model is not one."""
        return self._lifecycle.text_models.get(name)

    # InferenceServer.

    def submit(self, inference: Inference) -> None:
        """Run an inference; see `InferenceServer`."""
        request = inference.request
        rejected: ModelVersion | None = None
        while True:
            served = self._table.find(request.model_name, request.model_version)
            if served is rejected:
                text = f"Request for unknown model: '{request.model_name}' has no available versions"
                raise InferenceError(text, status=Status.NOT_FOUND)
            try:
                served.submit(inference)
            except Closed:
                rejected = served  # it is being replaced: its successor takes the request
            else:
                return

    def is_ready(self, name: str, version: int = -1) -> bool:
        """Whether a model answers."""
        served = self._table.get(name, version)
        return served is not None and served.ready

    def load(
        self,
        name: str,
        *,
        config: str = "",
        files: Mapping[str, bytes] | None = None,
        allow_code: bool = True,
    ) -> None:
        """Load a model, or reload it if its folder has changed; see `InferenceServer.load`.

        Args:
            name: of the model.
            config: its config as JSON; empty: that of its folder.
            files: by `<version>/<name>`, instead of its folder; None: its folder.
            allow_code: whether config and files may cause code to run that is not in the repository.
        """
        note_change(", ".join([*(["config"] if config else []), *(files or ())]))
        if self.options.control_mode is not ControlMode.EXPLICIT:
            raise _not_explicit()
        if self._stopping:
            raise stopping()
        request = LoadRequest(name=name, config_json=config, files=files, allow_code=allow_code)
        self._lifecycle.load(request)

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """Begin to unload a model, if it is loaded; see `InferenceServer`."""
        note_change("with its dependents" if dependents else "")
        if self.options.control_mode is not ControlMode.EXPLICIT:
            raise _not_explicit()
        self._lifecycle.unload(name, dependents=dependents)

    # Start and end.

    def start(self, names: Iterable[str] | None = None) -> None:
        """Load these models, or all with None; a failed load is recorded in `errors`.

        Raises:
            ModelNotFound: one of `names` is not in the repository.
        """
        entries = self._lifecycle.entries
        self._wanted = list(entries if names is None else names)
        for name in self._wanted:
            if name not in entries:
                raise _not_found(name, self.text_model_names)
        self._lifecycle.note_folders()
        # Polling means that somebody changes the files of loaded models.
        ExternalWeights.mapped = self.options.control_mode is not ControlMode.POLL
        owners = stage_owners(self._lifecycle.text_models)
        wanted = [entries[name] for name in self._wanted]
        alone = [entry for entry in wanted if not entry.is_ensemble and entry.name not in owners]
        with ThreadPoolExecutor(self.options.load_threads, thread_name_prefix="load") as pool:
            for future in [pool.submit(self._lifecycle.load_noted, entry) for entry in alone]:
                future.result()
        for entry in wanted:
            if entry not in alone:
                self._lifecycle.load_noted(entry)
        self._started = True
        if self.options.control_mode is ControlMode.POLL:
            self._poller = threading.Thread(target=self._poll, name="repository-poll", daemon=True)
            self._poller.start()

    def reject_loads(self) -> None:
        """Reject load requests from now on: the server is stopping."""
        self._stopping = True

    def close(self) -> None:
        """Unload everything; a second call does nothing."""
        self._closing.set()
        if self._poller is not None:
            self._poller.join()
        self._lifecycle.close()

    def _poll(self) -> None:
        """Follow changes of the folders until the repository closes."""
        wait_s = self.options.poll_s
        while not self._closing.wait(wait_s):
            wait_s = self.options.poll_s
            try:
                if self._lifecycle.follow_folders():
                    wait_s = min(wait_s, _SETTLE_S)
            except Exception:
                logger.exception("polling the repository failed")


def _not_found(name: str, known: list[str]) -> ModelNotFound:
    near, listed = closest(name, known=known), ", ".join(known) or "none"
    return ModelNotFound(
        f"there is no model {name[:_MAX_SHOWN]!r}",
        remedy=f"did you mean {near}?" if near else f"models that generate text: {listed}",
        field="model",
    )


def _unloaded(entry: ModelEntry, error: GenserveError | None) -> IndexEntry:
    """Return the line of a model that has no version, with the reason if its config cannot be used."""
    if error is None:
        return IndexEntry(name=entry.name)
    reason = " ".join(str(error).split())
    if entry.is_ambiguous:      # Triton's words in the index; those of the load are others
        reason = "model appears in two or more repositories"
    return IndexEntry(name=entry.name, state=ModelState.UNAVAILABLE, reason=reason)


def _not_explicit() -> InferenceError:
    return InferenceError(
        "explicit model load / unload is not allowed if polling is enabled",
        status=Status.UNAVAILABLE,
        remedy="start the server with --model-control-mode explicit",
    )
