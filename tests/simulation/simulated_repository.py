"""Repository of a simulation: the product's, with models in memory in the place of folders and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sse_starlette import sse

from genserve.config.diagnostics import Diagnostic
from genserve.config.model_config import ModelConfig
from genserve.engine.engine_thread import EngineThread
from genserve.engine.generation_request import GenerationRequest
from genserve.generation_metrics import Metrics
from genserve.inference import Inference
from genserve.inference_statistics import ModelStatistics
from genserve.repository import model_lifecycle, model_loader, served_models, unloader
from genserve.repository.config_resolution import ResolvedModel
from genserve.repository.index import ModelEntry
from genserve.repository.model_loader import ModelLoader, _Started
from genserve.repository.model_validation import ENSEMBLE_RULES, Validator
from genserve.textmodel.logits_config import LengthLimit
from genserve.textmodel.text_model import TextModel
from tests.simulation.text_requests import TextRequest
from tests.simulation.virtual_threads import ThreadPoolExecutor

# One for all simulations of a process: its numbers are not part of a simulation.
METRICS = Metrics()


class Folders:
    """The models of a repository and the versions of their files, in memory."""

    def __init__(self, configs: Mapping[str, ModelConfig], *, text_config: ModelConfig | None) -> None:
        self._configs = dict(configs)
        if text_config is not None:
            self._configs[text_config.name] = text_config
        self.text_name = text_config.name if text_config is not None else None
        self.changes = dict.fromkeys(self._configs, 0)

    def scan(self, *_args: object, **_options: object) -> dict[str, ModelEntry]:
        """Stands in for `index.scan`."""
        return {name: self._entry(name) for name in sorted(self._configs)}

    def fingerprint(self, path: Path) -> tuple[tuple[str, int, int], ...]:
        """Stands in for `index.fingerprint`."""
        return (("1/model", self.changes[path.name], 0),)

    def change(self, name: str) -> None:
        """Change the files of a model."""
        self.changes[name] += 1

    def _entry(self, name: str) -> ModelEntry:
        parsed: Any = SimpleNamespace(config=self._configs[name], diagnostics=(), message=None)
        return ModelEntry(name=name, path=Path("nowhere") / name, parsed=parsed)


class SimulatedValidator(Validator):
    """The product's rules of ensembles; the configs have no message that the other rules could read."""

    def _poll(self, entry: ModelEntry) -> tuple[tuple[Diagnostic, ...], tuple[Diagnostic, ...]]:
        return (), self._run(ENSEMBLE_RULES, entry) if entry.is_ensemble else ()


class SimulatedTextModel(TextModel):
    """A text model whose prompts are token ids, without a tokenizer."""

    def __init__(self, name: str, engine: EngineThread, *, max_length: int) -> None:
        self.name = name
        self.engine = engine
        self.adapter = self.adapters = None
        self.logits: Any = SimpleNamespace(
            max_length=max_length, context_length=max_length, length_limit=LengthLimit.MODEL
        )
        self.tokenizer: Any = SimpleNamespace(close=lambda: None)
        self._workers: Any = ThreadPoolExecutor(2, f"prepare-{name}")
        self._compilers: Any = ThreadPoolExecutor(2, f"compile-{name}")

    def prepare(
        self,
        prompt: Any,
        params: Any,
        *,
        num_choices: int,
        arrived_s: float | None = None,
        return_progress: bool = False,
    ) -> GenerationRequest:
        """Return the request to the engine; the prompt is the client's request itself."""
        request: TextRequest = prompt
        now_s = self.engine.now_s if arrived_s is None else arrived_s
        return request.generation_request(params=params, arrived_s=now_s)


class TextRuntime:
    """Implements `ModelRuntime` for a text model, as `TextInference` does, without inferences."""

    num_waiting = 0

    def __init__(self, model: SimulatedTextModel) -> None:
        self._model = model

    @property
    def ready(self) -> bool:
        return self._model.engine.alive

    def submit(self, inference: Inference) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._model.close()


class Factory:
    """What loads the models of a simulation: `load_text`, and backends by model."""

    def __init__(
        self, folders: Folders, *, load_text: Callable[[str], SimulatedTextModel], start_backend: Any
    ) -> None:
        self.folders = folders
        self.load_text = load_text
        self.start_backend = start_backend

    def load(self, _source: object) -> None:
        """A backend shares nothing between its instances."""

    def __call__(self, source: Any, _shared: object, placement: Any) -> Any:
        return self.start_backend(source, placement)

    def resolve(self, entry: ModelEntry, *_args: object, **_options: object) -> ResolvedModel:
        """Stands in for `resolve_model`."""
        assert entry.config is not None
        return ResolvedModel(config=entry.config, path=entry.path, versions=(1,))

    def loader(self, **options: Any) -> ModelLoader:
        """Stands in for `ModelLoader`."""
        loader = SimulatedLoader(**options)
        object.__setattr__(loader, "factory", self)
        return loader


class SimulatedLoader(ModelLoader):
    """Loads the text model of the simulation; all others as the product does."""

    factory: Factory

    def _start(self, model: ResolvedModel, version: int) -> list[_Started]:
        if model.name != self.factory.folders.text_name:
            return super()._start(model, version)
        text_model = self.factory.load_text(model.name)
        runtime = TextRuntime(text_model)
        started = _Started(model=model, runtime=runtime, statistics=ModelStatistics(), text_model=text_model)
        return [started]


@contextmanager
def models_in_memory(factory: Factory) -> Iterator[None]:
    """Have the product's repository read the folders of the factory, and load by it."""
    folders = factory.folders
    stand_ins: list[tuple[Any, str, Any]] = [
        (model_lifecycle, "scan", folders.scan),
        (model_lifecycle, "fingerprint", folders.fingerprint),
        (model_lifecycle, "Validator", SimulatedValidator),
        (model_lifecycle, "return_free_memory", lambda: None),
        (unloader, "return_free_memory", lambda: None),
        (unloader, "gc", SimpleNamespace(collect=lambda: 0)),
        (model_loader, "resolve_model", factory.resolve),
        (model_loader, "find_backend", lambda *_args, **_options: factory),
        (served_models, "ModelLoader", factory.loader),
        (sse, "_ensure_watcher_started_on_this_loop", lambda: None),  # watches the process, not a server
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in stand_ins]
    for module, name, stand_in in stand_ins:
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
