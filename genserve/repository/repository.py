"""Repository: the models there are, which of them answer, and the way in to them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from genserve.errors import (
    Closed,
    GenserveError,
    InferenceError,
    ModelNotFound,
    ModelNotReady,
    Status,
)
from genserve.generation_metrics import Metrics
from genserve.inference import Inference
from genserve.repository.ensemble_steps import stage_owners
from genserve.repository.model_lifecycle import ModelLifecycle
from genserve.repository.model_loader import ModelLoader
from genserve.repository.model_versions import IndexEntry, ModelState, ModelTable, ModelVersion
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.response_cache import ResponseCache
from genserve.repository.upload import check_model_name
from genserve.schedulers.rate_limiter import RateLimiter
from genserve.textmodel.text_model import TextModel

__all__ = ["Repository"]

logger = logging.getLogger(__name__)


class Repository:
    """All models of one or more folders; the `InferenceServer` for routes, ensembles and BLS.

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
        self._versions = ModelTable()
        cache_bytes = self.options.cache_bytes
        loader = ModelLoader(
            server=self,
            versions=self._versions,
            options=self.options,
            metrics=metrics or Metrics(),
            cache=ResponseCache(size_bytes=cache_bytes) if cache_bytes else None,
            rate_limiter=RateLimiter(self.options.resources) if self.options.rate_limiter else None,
        )
        self._control = ModelLifecycle(
            roots, options=self.options, versions=self._versions, loader=loader
        )
        self._wanted: list[str] | None = None       # None: `start` has not been called
        self._started = False
        self._closing = threading.Event()
        self._poller: threading.Thread | None = None

    # What there is.

    @property
    def generation_names(self) -> list[str]:
        """The generation models there are, loaded or not."""
        return list(self._control.text_models)

    @property
    def generation_models(self) -> list[TextModel]:
        """The generation models that answer."""
        return [served.text_model for served in self._versions.served if served.text_model is not None]

    @property
    def served(self) -> list[ModelVersion]:
        """Every version of every model that answers."""
        return self._versions.served

    @property
    def errors(self) -> dict[str, GenserveError]:
        """Why a model that was to be loaded is not."""
        return dict(self._control.errors)

    @property
    def state(self) -> ModelState:
        """The worst of all models': UNAVAILABLE if a load failed or an engine died."""
        if self._control.errors or not all(served.runner.ready for served in self._versions.served):
            return ModelState.UNAVAILABLE
        return ModelState.READY if self._started else ModelState.LOADING

    def index(self, *, ready_only: bool = False) -> list[IndexEntry]:
        """Return a line for each version, and one for each model that was never loaded; by name."""
        known = self._versions.index()
        if ready_only:
            return [entry for entry in known if entry.state is ModelState.READY]
        names = {entry.name for entry in known}
        untouched = [IndexEntry(name=name) for name in self._control.entries if name not in names]
        # Not what only a load call brought.
        listed = [entry for entry in known if entry.name in self._control.entries]
        return sorted([*listed, *untouched], key=lambda entry: (entry.name, entry.version or 0))

    def versions(self, name: str) -> list[int]:
        """Return the versions of a model that answer, ascending."""
        return [served.version for served in self._versions.of(name)]

    def find(self, name: str, version: int = -1) -> ModelVersion:
        """Return a version of a model; -1: the highest that answers.

        Raises:
            InferenceError: there is none, with Triton's text.
        """
        return self._versions.find(name, version)

    def get(self, name: str | None = None) -> TextModel:
        """Return a generation model; without a name, the only one.

        Raises:
            ModelNotFound: there is none of this name, or no name and several models.
            ModelNotReady: it is loading, or its load failed.
        """
        if name is None:
            name = self.only_name()
        served = self._versions.get(name)
        if served is not None and served.text_model is not None:
            return served.text_model
        if name not in self._control.entries:
            raise self._not_found(name)
        if served is not None:
            known = ", ".join(self.generation_names) or "none"
            raise ModelNotFound(
                f"model {name!r} does not generate text", remedy=f"models that do: {known}", field="model"
            )
        states = self._versions.states(name)
        state = states[-1].state.lower() if states and states[-1].state else "not loaded"
        if name in self._control.errors:
            state = "unavailable"
        raise ModelNotReady(f"model {name!r} is {state}", remedy="the server's log has the reason")

    def only_name(self) -> str:
        """Return the name of the only generation model: of those to be loaded, or else of all there are.

        Raises:
            ModelNotFound: there is not exactly one.
        """
        names = [name for name in self.generation_names if self._wanted is None or name in self._wanted]
        if len(names) != 1:
            raise ModelNotFound(
                "no model is named, and there is not exactly one",
                remedy=f"name one of: {', '.join(names) or 'none is there'}",
                field="model",
            )
        return names[0]

    # InferenceServer.

    def submit(self, inference: Inference) -> None:
        """Run an inference; see `InferenceServer`."""
        request = inference.request
        refused: ModelVersion | None = None
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
        served = self._versions.get(name, version)
        return served is not None and served.ready

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        """Whether a model gives any number of responses."""
        return self._versions.find(name, version).config.decoupled

    def load(
        self,
        name: str,
        *,
        config: str = "",
        files: Mapping[str, bytes] | None = None,
        allow_code: bool = True,
    ) -> None:
        """Load a model, or load it anew if its folder has changed; see `ModelRepository.load`."""
        if self.options.control_mode is not ControlMode.EXPLICIT:
            raise _not_explicit()
        check_model_name(name)
        self._control.load(name, config_json=config, files=files, allow_code=allow_code)

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """Begin to unload a model; one that is not loaded is fine; see `InferenceServer`."""
        if self.options.control_mode is not ControlMode.EXPLICIT:
            raise _not_explicit()
        self._control.unload(name, dependents=dependents)

    # Its life.

    def start(self, names: Iterable[str] | None = None) -> None:
        """Load these models; one that fails is noted in `errors` and passed over. None: all there are.

        Raises:
            ModelNotFound: one of `names` is not in the repository.
        """
        entries = self._control.entries
        self._wanted = list(entries if names is None else names)
        for name in self._wanted:
            if name not in entries:
                raise self._not_found(name)
        self._control.note_folders()
        owners = stage_owners(self._control.text_models)
        wanted = [entries[name] for name in self._wanted]
        alone = [entry for entry in wanted if not entry.is_ensemble and entry.name not in owners]
        with ThreadPoolExecutor(self.options.load_threads, thread_name_prefix="load") as pool:
            for future in [pool.submit(self._control.load_noted, entry) for entry in alone]:
                future.result()
        for entry in wanted:
            if entry not in alone:
                self._control.load_noted(entry)
        self._started = True
        if self.options.control_mode is ControlMode.POLL:
            self._poller = threading.Thread(target=self._poll, name="repository-poll", daemon=True)
            self._poller.start()

    def close(self) -> None:
        """Unload everything; a second call does nothing."""
        self._closing.set()
        if self._poller is not None:
            self._poller.join()
        self._control.close()

    def _poll(self) -> None:
        """Follow the folders until the repository closes."""
        while not self._closing.wait(self.options.poll_s):
            try:
                self._control.follow_folders()
            except Exception:
                logger.exception("polling the repository failed")

    def _not_found(self, name: str) -> ModelNotFound:
        known = ", ".join(self.generation_names) or "none"
        return ModelNotFound(
            f"there is no model {name!r}", remedy=f"models that generate text: {known}", field="model"
        )


def _not_explicit() -> InferenceError:
    return InferenceError(
        "explicit model load / unload is not allowed if polling is enabled",
        status=Status.UNAVAILABLE,
        remedy="start the server with --model-control-mode explicit",
    )
