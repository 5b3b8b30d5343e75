"""Repository: the models there are, which of them are loaded, and the door to them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from genserve.backends.ensemble import GenerationEnsemble
from genserve.errors import GenserveError, ModelNotFound, ModelNotReady
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
    def healthy(self) -> bool:
        """Whether all that was to be loaded is, and every engine is alive."""
        return bool(self._ready) and not self._errors and all(
            state is ModelState.READY for state in self._states.values()
        ) and all(model.loop.alive for model in self._ready.values())

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
            name = self._only_name()
        model = self._ready.get(name)
        if model is not None:
            return model
        if name not in self._states:
            raise self._not_found(name)
        raise ModelNotReady(
            f"model {name!r} is {self._states[name].value.lower()}", remedy="the server's log has the reason"
        )

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
            logger.error("model failed to load", extra={"model": name, "reason": str(error)})  # noqa: TRY400
            self._errors[name] = error
            self._states[name] = ModelState.UNAVAILABLE
        else:
            self._states[name] = ModelState.READY

    def _only_name(self) -> str:
        names = list(self._states)
        if len(names) != 1:
            raise ModelNotFound(
                "the request names no model, and there is not exactly one",
                remedy=f"name one of: {', '.join(names) or 'none is loaded'}",
            )
        return names[0]

    def _not_found(self, name: str) -> ModelNotFound:
        roots = ", ".join(str(root) for root in self._roots)
        known = ", ".join(self.names) or "none"
        return ModelNotFound(f"there is no model {name!r}", remedy=f"models in {roots}: {known}")
