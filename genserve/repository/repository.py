"""Repository: the models there are, which of them are loaded, and the door to them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from genserve.backends.ensemble import GenerationEnsemble
from genserve.errors import GenserveError, ModelNotFound, ModelNotReady, RepositoryError
from genserve.metrics import Metrics
from genserve.repository.index import scan
from genserve.repository.stages import load_ensemble

__all__ = ["ModelState", "Repository"]

logger = logging.getLogger(__name__)


class ModelState(StrEnum):
    """Triton's words for where a model stands."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"


class Repository:
    """The generation models of one or more repository folders.

    `load` runs on one thread; everything else is safe from any.
    """

    def __init__(
        self, roots: Iterable[Path], *, max_queue: int = 256, metrics: Metrics | None = None
    ) -> None:
        """Read the folders; nothing is loaded yet.

        Raises:
            RepositoryError: a root is not a folder.
        """
        self._roots = tuple(roots)
        self._max_queue = max_queue
        self._metrics = metrics or Metrics()
        self._entries = scan(self._roots)
        self._states: dict[str, ModelState] = {}
        self._errors: dict[str, GenserveError] = {}
        self._ready: dict[str, GenerationEnsemble] = {}

    @property
    def names(self) -> list[str]:
        """The ensembles there are, loaded or not."""
        return [name for name, entry in self._entries.items() if entry.is_ensemble]

    @property
    def ready(self) -> list[GenerationEnsemble]:
        """The models that answer."""
        return list(self._ready.values())

    @property
    def errors(self) -> dict[str, GenserveError]:
        """Why a model that was to be loaded is not."""
        return dict(self._errors)

    @property
    def state(self) -> ModelState:
        """The worst of all models': UNAVAILABLE if a load failed or an engine died."""
        if self._errors or not all(model.loop.alive for model in self.ready):
            return ModelState.UNAVAILABLE
        loading = not self._states or ModelState.LOADING in self._states.values()
        return ModelState.LOADING if loading else ModelState.READY

    def load(self, names: Iterable[str] = ()) -> None:
        """Load these models, or all ensembles; one that fails is noted in `errors` and passed over.

        Raises:
            ModelNotFound: one of `names` is not in the repository.
        """
        wanted = list(names) or self.names
        for name in wanted:
            if name not in self.names:
                raise self._not_found(name)
        self._states.update(dict.fromkeys(wanted, ModelState.LOADING))
        for name in wanted:
            self._load(name)

    def get(self, name: str | None = None) -> GenerationEnsemble:
        """Return a loaded model; without a name, the only one.

        Raises:
            ModelNotFound: there is none of this name, or no name and several models.
            ModelNotReady: it is loading, or its load failed.
        """
        if name is None:
            name = self.only_name()
        model = self._ready.get(name)
        if model is not None:
            return model
        if name not in self.names:
            raise self._not_found(name)
        state = self._states[name].value.lower() if name in self._states else "not loaded"
        raise ModelNotReady(f"model {name!r} is {state}", remedy="the server's log has the reason")

    def only_name(self) -> str:
        """Return the name of the only model: of those that were to be loaded, or else of all there are.

        Raises:
            ModelNotFound: there is not exactly one.
        """
        names = list(self._states) or self.names
        if len(names) != 1:
            raise ModelNotFound(
                "no model is named, and there is not exactly one",
                remedy=f"name one of: {', '.join(names) or 'none is there'}",
                field="model",
            )
        return names[0]

    def close(self) -> None:
        """Unload everything; a second call does nothing."""
        while self._ready:
            _, model = self._ready.popitem()
            model.close()

    def _load(self, name: str) -> None:
        try:
            self._ready[name] = load_ensemble(
                self._entries[name], self._entries, max_queue=self._max_queue, metrics=self._metrics
            )
        except GenserveError as error:
            self._errors[name] = error
        except Exception as error:
            logger.exception("model %s failed to load", name)
            reason = f"{type(error).__name__}: {error}"
            self._errors[name] = RepositoryError(f"model {name!r} failed to load: {reason}")
        self._states[name] = ModelState.READY if name in self._ready else ModelState.UNAVAILABLE

    def _not_found(self, name: str) -> ModelNotFound:
        roots = ", ".join(str(root) for root in self._roots)
        known = ", ".join(self.names) or "none"
        return ModelNotFound(
            f"there is no model {name!r}", remedy=f"models in {roots}: {known}", field="model"
        )
