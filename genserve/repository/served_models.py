"""Served models: the models of a repository, as routes, ensembles and BLS calls see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from genserve.batching.rate_limiter import RateLimiter
from genserve.errors import (
    SEE_LOG,
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
from genserve.repository.index import ModelEntry
from genserve.repository.model_lifecycle import ModelLifecycle
from genserve.repository.model_loader import ModelLoader
from genserve.repository.model_versions import UNLOADED, IndexEntry, ModelState, ModelTable, ModelVersion
from genserve.repository.on_demand import LoadedModel, OnDemandModels
from genserve.repository.options import RepositoryOptions
from genserve.repository.response_cache import ResponseCache
from genserve.repository.served_encoders import MAX_SHOWN, ServedEncoders
from genserve.repository.text_stages import TextStages, stage_owners
from genserve.textmodel.text_model import TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A text model, or an adapter of one, that requests may name.

    Attributes:
        name: its name.
        base: the name of the model whose adapter it is; None: it is no adapter.
        model: the model; None: it is not loaded.
        loaded: its memory, and until when it is loaded; None: it is not loaded on demand, or not loaded.
        weights: the folder of the version of its logits stage, or of the adapter.
    """

    name: str
    base: str | None
    model: TextModel | None
    loaded: LoadedModel | None
    weights: Path

    @property
    def memory_bytes(self) -> int:
        """The memory that it may take, KV cache included; 0: it is not loaded."""
        if self.loaded is not None:
            return self.loaded.size_bytes
        if self.model is None:
            return 0
        cache_bytes = 0 if self.base is not None else self.model.kv_cache_bytes     # its base has it
        return self.model.weights_bytes + cache_bytes


class ServedModels(ABC):
    """The models of one or more folders; the `InferenceServer` of routes, ensembles and BLS.

    Safe from any thread. Who loads the models is decided by a subclass: `Repository` loads them here, in a
    deployment replicas do.

    Attributes:
        options: the settings of the repository.
        table: the versions that answer, and the states of all versions.
        lifecycle: the folders, the errors of failed loads, and the replacement of versions.
        wanted: the names of the models that are to be served; None: all.
        on_demand: loads models when requests need them; None: requests load none.
    """

    on_demand: OnDemandModels | None = None

    def __init__(self, roots: Iterable[Path], *, options: RepositoryOptions, metrics: Metrics) -> None:
        """Read the folders; nothing is served yet.

        Raises:
            RepositoryError: a root is not a folder.
        """
        self.options = options
        self.table = ModelTable()
        loader = ModelLoader(
            server=self,
            table=self.table,
            options=options,
            metrics=metrics,
            cache=ResponseCache(size_bytes=options.cache_bytes) if options.cache_bytes else None,
            rate_limiter=RateLimiter(options.resources) if options.rate_limiter else None,
        )
        self.lifecycle = ModelLifecycle(roots, options=options, table=self.table, loader=loader)
        self.wanted: list[str] | None = None

    @property
    @abstractmethod
    def state(self) -> ModelState:
        """READY, LOADING, or UNAVAILABLE: what a client sees of all models together."""

    @abstractmethod
    def load(
        self,
        name: str,
        *,
        config: str = "",
        files: Mapping[str, bytes | Path] | None = None,
        allow_code: bool = True,
    ) -> None:
        """Load a model on request, or reload it if its folder has changed; see `InferenceServer.load`.

        Args:
            name: the model's name.
            config: its config as JSON; empty: the config of its folder.
            files: its files by `<version>/<name>`, as content or as paths on this machine, instead of its
                folder; None: its folder.
            allow_code: whether config and files may cause code to run that is not in the repository.
        """

    @abstractmethod
    def unload(self, name: str, *, dependents: bool = False) -> None:
        """Begin to unload a model on request, if it is loaded; see `InferenceServer.unload`."""

    @property
    def text_model_names(self) -> list[str]:
        """The names of all text models and their adapters, loaded or not."""
        of_folders = (*self.lifecycle.text_models, *self.lifecycle.adapters)
        return list(dict.fromkeys((*of_folders, *(model.name for model in self._text_models))))

    @property
    def text_models(self) -> list[TextModel]:
        """The text models that answer, each with an engine of its own: without adapters."""
        return [model for model in self._text_models if model.base is None]

    @property
    def adapter_models(self) -> list[TextModel]:
        """The adapters that answer, which share the engines of their bases."""
        return [model for model in self._text_models if model.base is not None]

    @property
    def _text_models(self) -> list[TextModel]:
        return [served.text_model for served in self.table.served if served.text_model is not None]

    @property
    def listed_models(self) -> list[ListedModel]:
        """The text models, then their adapters, that answer or are loaded on demand."""
        loaded = {} if self.on_demand is None else {one.name: one for one in self.on_demand.loaded()}
        validator = self.lifecycle.validator
        bases = {**dict.fromkeys(validator.text_models), **validator.adapters}
        weights = {name: stages["logits"].highest_version for name, stages in validator.text_models.items()}
        weights |= {name: validator.entries[name].highest_version for name in validator.adapters}
        for model in self.adapter_models:   # also those that only a load request had
            assert model.base is not None
            assert model.adapter is not None
            bases[model.name], weights[model.name] = model.base.name, model.adapter.folder
        listed: list[ListedModel] = []
        for name, base in bases.items():
            served = self.table.get(name)
            text_model = served.text_model if served is not None else None
            if text_model is not None or self.on_demand is not None:
                listed.append(
                    ListedModel(
                        name=name,
                        base=base,
                        model=text_model,
                        loaded=loaded.get(name),
                        weights=weights[name],
                    )
                )
        return listed

    @property
    def encoders(self) -> ServedEncoders:
        """The models of vectors or scores."""
        return ServedEncoders(
            self.table, self.lifecycle, on_demand=self.on_demand, not_ready=self._not_ready
        )

    @property
    def served(self) -> list[ModelVersion]:
        """All versions of all models that answer."""
        return self.table.served

    @property
    def errors(self) -> dict[str, GenserveError]:
        """The errors of the models whose last load has failed; the old versions of some answer."""
        return dict(self.lifecycle.errors)

    @property
    def stage_names(self) -> frozenset[str]:
        """The names of the stages of all text models."""
        models = self.lifecycle.text_models.values()
        return frozenset(stage.name for stages in models for stage in stages.values())

    def index(self, *, ready_only: bool = False) -> list[IndexEntry]:
        """Return an entry for each version and for each model that was never loaded, by name.

        A version that is READY has a reason only if the last reload of its model has failed.
        """
        errors = self.errors
        known = [_with_failed_reload(entry, errors.get(entry.name)) for entry in self.table.index()]
        if ready_only:
            return [entry for entry in known if entry.state is ModelState.READY]
        names = {entry.name for entry in known}
        validator = self.lifecycle.validator
        owners = stage_owners(validator.text_models)
        untouched = [
            _unloaded(entry, errors.get(owners.get(name, name)) or validator.config_error(entry))
            for name, entry in validator.entries.items()
            if name not in names
        ]
        # Without models that only a load request had.
        listed = [entry for entry in known if entry.name in validator.entries]
        return sorted([*listed, *untouched], key=lambda entry: (entry.name, entry.version or 0))

    def versions(self, name: str) -> list[int]:
        """Return the versions of a model that answer, ascending."""
        return [served.version for served in self.table.of(name)]

    def find(self, name: str, version: int = -1) -> ModelVersion:
        """Return a version of a model; -1: the highest that answers.

        Raises:
            InferenceError: there is no such version, with Triton's text.
        """
        return self.table.find(name, version)

    def text_model(self, name: str | None = None) -> TextModel:
        """Return a text model; without a name, the only one.

        Raises:
            ModelNotFound: an unknown name, or no name and not exactly one model.
            ModelNotReady: the model is loading, or could not be loaded.
        """
        if name is None:
            name = self.only_text_model_name()
        served = self.table.get(name)
        if served is not None and served.text_model is not None:
            return served.text_model
        if name not in self.lifecycle.entries:
            raise not_found(name, self.text_model_names)
        if served is not None:
            known = ", ".join(self.text_model_names)
            remedy = f"models that do: {known}" if known else "load one that does; no model does now"
            raise ModelNotFound(f"model {name!r} does not generate text", remedy=remedy, field="model")
        raise self._not_ready(name)

    def _not_ready(self, name: str) -> ModelNotReady:
        unloaded = IndexEntry(name=name, state=ModelState.UNAVAILABLE, reason=UNLOADED)
        last = [unloaded, *self.table.states(name)][-1]
        if last.state in (ModelState.LOADING, ModelState.UNLOADING):
            return ModelNotReady(f"model {name!r} is {last.state.lower()}", remedy="try again in a moment")
        base = self.lifecycle.adapters.get(name, "")
        if base in self.lifecycle.text_models and self.table.get(base) is None:
            return ModelNotReady(
                f"adapter {name!r} is not ready, because its base {base!r} is not",
                remedy=f"load it: POST /v2/repository/models/{name}/load",
            )
        if name in self.lifecycle.errors or last.reason != UNLOADED:
            return ModelNotReady(f"model {name!r} could not be loaded", remedy=SEE_LOG)
        return ModelNotReady(
            f"model {name!r} is not loaded", remedy=f"load it: POST /v2/repository/models/{name}/load"
        )

    def only_text_model_name(self) -> str:
        """Return the name of the only text model among the wanted models.

        Raises:
            ModelNotFound: there is not exactly one model, not counting the adapters of models.
        """
        names = self._wanted(self.lifecycle.text_models) or self._wanted(self.lifecycle.adapters)
        if len(names) != 1:
            raise ModelNotFound(
                f"the request names no model, and this server has {len(names)}",
                remedy=f"set `model` to one of: {', '.join(names)}" if names else "load a text model first",
                field="model",
            )
        return names[0]

    def _wanted(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.wanted is None or name in self.wanted]

    def text_stages(self, name: str) -> TextStages | None:
        """Return the stages of a text model, or of an adapter's base, by role; None: the model is neither."""
        return self.lifecycle.text_models.get(self.lifecycle.adapters.get(name, name))

    def submit(self, inference: Inference) -> None:
        """Run an inference; see `InferenceServer`."""
        request = inference.request
        rejected: ModelVersion | None = None
        while True:
            served = self.table.get(request.model_name, request.model_version)
            if served is None:
                if self._submit_once_loaded(inference):
                    return
                raise self.table.not_found(request.model_name, request.model_version)
            if served is rejected:
                text = f"Request for unknown model: '{request.model_name}' has no available versions"
                raise InferenceError(text, status=Status.NOT_FOUND)
            try:
                served.submit(inference)
            except Closed:
                rejected = served  # it is being replaced: its successor takes the request
            else:
                return

    def _submit_once_loaded(self, inference: Inference) -> bool:
        """Run an inference, whose model does not answer, when the model has been loaded; False: never."""
        return False

    def is_ready(self, name: str, version: int = -1) -> bool:
        """Whether a model answers."""
        served = self.table.get(name, version)
        return served is not None and served.ready


def not_found(name: str, known: list[str]) -> ModelNotFound:
    """Return the error for an unknown name; `known`: the names of the models that generate text."""
    near, listed = closest(name, known=known), ", ".join(known) or "none"
    return ModelNotFound(
        f"there is no model {name[:MAX_SHOWN]!r}",
        remedy=f"did you mean {near}?" if near else f"models that generate text: {listed}",
        field="model",
    )


def _with_failed_reload(entry: IndexEntry, error: GenserveError | None) -> IndexEntry:
    if error is None or entry.state is not ModelState.READY:
        return entry
    reason = " ".join(str(error).split())
    return replace(entry, reason=f"answers from its old files, as the last load has failed: {reason}")


def _unloaded(entry: ModelEntry, error: GenserveError | None) -> IndexEntry:
    """Return the line of a model that has no version, with the reason if its config cannot be used."""
    if error is None:
        return IndexEntry(name=entry.name)
    reason = " ".join(str(error).split())
    if entry.is_ambiguous:      # Triton's words in its index; its load has other words
        reason = "model appears in two or more repositories"
    return IndexEntry(name=entry.name, state=ModelState.UNAVAILABLE, reason=reason)
