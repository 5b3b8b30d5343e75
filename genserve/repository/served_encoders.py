"""Served encoders: the models of a repository that compute vectors or scores of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from genserve.config.model_config import EnsembleStep, ModelConfig
from genserve.errors import InferenceError, ModelNotFound, ModelNotReady, RepositoryError
from genserve.repository.encoder_model import EncoderModel, encoder_model
from genserve.repository.model_lifecycle import ModelLifecycle
from genserve.repository.model_versions import ModelTable
from genserve.repository.on_demand import LoadedModel, OnDemandModels

MAX_SHOWN = 128    # characters of an unknown name in an error: a client may send any text


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedEncoder:
    """A model of vectors or scores that requests may name.

    Attributes:
        model: the model, loaded or not.
        is_ready: whether it answers.
        loaded: its memory, and until when it is loaded; None: it is not loaded on demand, or not loaded.
        weights: the folder of the version of its encoder.
    """

    model: EncoderModel
    is_ready: bool
    loaded: LoadedModel | None
    weights: Path


class ServedEncoders:
    """The models of vectors or scores that requests may name: that answer, or are loaded on demand."""

    def __init__(
        self,
        table: ModelTable,
        lifecycle: ModelLifecycle,
        *,
        on_demand: OnDemandModels | None,
        not_ready: Callable[[str], ModelNotReady],
    ) -> None:
        """Find the models among those of a `ServedModels`; `not_ready` says why one does not answer."""
        self._table = table
        self._lifecycle = lifecycle
        self._on_demand = on_demand
        self._not_ready = not_ready

    def __contains__(self, name: object) -> bool:
        return name in self._known()

    def listed(self) -> list[ListedEncoder]:
        """Return the models, by name."""
        loaded = {} if self._on_demand is None else {one.name: one for one in self._on_demand.loaded()}
        ready = self._ready()
        return [
            ListedEncoder(
                model=model,
                is_ready=name in ready,
                loaded=loaded.get(name),
                weights=entry.highest_version,
            )
            for name, model in sorted(self._known().items())
            if (entry := self._lifecycle.entries.get(model.encoder.model_name)) is not None
        ]

    def only_name(self) -> str:
        """Return the name of the only model.

        Raises:
            ModelNotFound: there is not exactly one model.
        """
        known = [*self._known()]
        if len(known) != 1:
            number = len(known) or "no"
            problem = f"the request names no model, and {number} models compute vectors or scores of texts"
            raise ModelNotFound(problem, remedy=_remedy(known), field="model")
        return known[0]

    def find(self, name: str | None = None) -> EncoderModel:
        """Return a model; without a name, the only one.

        Raises:
            ModelNotFound: an unknown name, a model of another kind, or no name and not exactly one model.
            ModelNotReady: the model is loading, or could not be loaded.
        """
        name = name or self.only_name()
        served = self._table.get(name)
        if served is not None and (ready := _encoders({name: served.config}, self._config_of)):
            return ready[name]
        known = self._known()
        if name not in self._lifecycle.entries:
            problem = f"there is no model {name[:MAX_SHOWN]!r}"
            raise ModelNotFound(problem, remedy=_remedy(known), field="model")
        is_other = name in self._lifecycle.text_models if self._on_demand is None else name not in known
        if served is None and not is_other:
            raise self._not_ready(name)
        problem = f"model {name!r} computes neither vectors nor scores of texts"
        raise ModelNotFound(problem, remedy=_remedy(known), field="model")

    def _ready(self) -> dict[str, EncoderModel]:
        """Return the models that answer, by name."""
        return _encoders({served.name: served.config for served in self._table.served}, self._config_of)

    def _config_of(self, step: EnsembleStep) -> ModelConfig:
        return self._table.find(step.model_name, step.model_version).config

    def _known(self) -> dict[str, EncoderModel]:
        """Return the models that answer, and those that would be loaded on demand, by name."""
        if self._on_demand is None:
            return self._ready()
        entries = self._lifecycle.entries

        def config_of(step: EnsembleStep) -> ModelConfig:
            entry = entries.get(step.model_name)
            if entry is None or entry.config is None:
                raise InferenceError(f"the step {step.model_name!r} cannot be read")
            return entry.config

        configs = {name: entry.config for name, entry in entries.items() if entry.config is not None}
        return _encoders(configs, config_of) | self._ready()


def _encoders(
    configs: dict[str, ModelConfig], config_of: Callable[[EnsembleStep], ModelConfig]
) -> dict[str, EncoderModel]:
    """Return the encoder models among ensembles whose steps can be read; a load says what is wrong."""
    found: dict[str, EncoderModel] = {}
    for name, config in configs.items():
        with suppress(InferenceError, RepositoryError):
            if (model := encoder_model(config, config_of)) is not None:
                found[name] = model
    return found


def _remedy(known: Iterable[str]) -> str:
    if names := ", ".join(known):
        return f"models of vectors or scores: {names}"
    return "load an encoder; `genserve export --pooling last` makes one of a text model (docs/embeddings.md)"
