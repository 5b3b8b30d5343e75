"""An inference server of small models written in the test, each run by a real instance on a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf import text_format

from genserve.backends.backend import Placement
from genserve.batching.model_instance import ModelInstance
from genserve.batching.queue_scheduler import make_scheduler
from genserve.config.model_config import ModelConfig, TensorSpec
from genserve.config.schema import new_model_config
from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceResponse
from genserve.inference_statistics import ModelStatistics

Execute = Callable[[Inference], None]


@dataclass
class FakeEntry:
    name: str
    version: int | None
    state: str | None
    reason: str = ""


@dataclass
class FakeModel:
    """One version of a model that runs a function; the `ModelVersion` protocol."""

    config: ModelConfig
    execute_one: Execute
    version: int = 1
    load_s: float = 0.25
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(self.config, num_instances=1, path=Path("nowhere"))
        self.instance = ModelInstance(
            lambda: self,
            number=0,
            placement=Placement(name=f"{self.name}_0", kind="CPU"),
            scheduler=self.scheduler,
            statistics=self.statistics,
        )

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def ready(self) -> bool:
        return self.instance.alive

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    def execute(self, batch: Sequence[Inference]) -> None:
        for inference in batch:
            self.execute_one(inference)

    def close(self) -> None:
        pass


class FakeInferenceServer:
    """A `Repository` of some `FakeModel`s: validates names as the repository does, in Triton's words."""

    on_demand = None

    def __init__(self, models: Iterable[FakeModel]) -> None:
        self._models = {model.name: model for model in models}
        self.ready = True
        self.loaded: list[tuple[str, str, dict[str, bytes]]] = []
        self.unloaded: list[tuple[str, bool]] = []

    def close(self) -> None:
        for model in self._models.values():
            model.scheduler.close()
            model.instance.join()

    def submit(self, inference: Inference) -> None:
        request = inference.request
        model = self.find(request.model_name)
        for name in request.inputs:
            if model.config.input(name) is None:
                raise InferenceError(f"unexpected inference input '{name}' for model '{model.name}'")
        inference.accept(model_version=model.version, batch_size=inference.batch_size)
        inference.when_ended(model.statistics.ended)
        model.scheduler.submit(inference)

    @property
    def state(self) -> str:
        return "READY" if self.ready else "UNAVAILABLE"

    @property
    def served(self) -> list[FakeModel]:
        return [self._models[name] for name in sorted(self._models)]

    def find(self, name: str, version: int = -1) -> FakeModel:
        if name not in self._models:
            raise InferenceError(
                f"Request for unknown model: '{name}' is not found", status=Status.NOT_FOUND
            )
        if version not in (-1, self._models[name].version):
            raise InferenceError(
                f"Request for unknown model: '{name}' version {version} is not found",
                status=Status.NOT_FOUND,
            )
        return self._models[name]

    def versions(self, name: str) -> list[int]:
        return [self._models[name].version] if name in self._models else []

    def index(self, *, ready_only: bool = False) -> list[FakeEntry]:
        ready = [FakeEntry(model.name, model.version, "READY") for model in self.served]
        others = [FakeEntry("zz_broken", 1, "UNAVAILABLE", "no weights"), FakeEntry("zz_new", None, None)]
        return ready if ready_only else ready + others

    def is_ready(self, name: str, version: int = -1) -> bool:
        return name in self._models and version in (-1, self._models[name].version)

    def load(
        self,
        name: str,
        *,
        config: str = "",
        files: Mapping[str, bytes] | None = None,
        allow_code: bool = True,
    ) -> None:
        if name not in self._models:
            raise InferenceError(
                f"failed to load '{name}', failed to poll from model repository", status=Status.INTERNAL
            )
        self.loaded.append((name, config, dict(files or {})))

    def unload(self, name: str, *, dependents: bool = False) -> None:
        self.unloaded.append((name, dependents))


def identity(inference: Inference) -> None:
    """Answer with every input X as output Y."""
    outputs = tuple(tensor.renamed("Y") for tensor in inference.inputs.values())
    inference.send(InferenceResponse(outputs=outputs), final=True)


def fake_model(
    name: str,
    execute: Execute = identity,
    *,
    data_type: str = "TYPE_FP32",
    dims: tuple[int, ...] = (-1,),
    max_batch_size: int = 0,
    decoupled: bool = False,
    labels: Sequence[str] = (),
    **config: object,
) -> FakeModel:
    """Return a model from X to Y of one data type."""
    message = new_model_config()
    text_format.Parse(
        f'name: "{name}" backend: "python" max_batch_size: {max_batch_size} '
        f'input {{ name: "X" data_type: {data_type} dims: {list(dims)} }} '
        f'output {{ name: "Y" data_type: {data_type} dims: {list(dims)} }}',
        message,
    )
    return FakeModel(
        ModelConfig(
            name=name,
            backend="python",
            max_batch_size=max_batch_size,
            inputs=(TensorSpec(name="X", data_type=data_type, dims=dims),),
            outputs=(TensorSpec(name="Y", data_type=data_type, dims=dims),),
            decoupled=decoupled,
            message=message,
            **config,
        ),
        execute,
        labels={"Y": labels} if labels else {},
    )
