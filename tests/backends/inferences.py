"""Inferences: batches passed directly to backends, as an instance passes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from google.protobuf import text_format

from genserve.backends.backend import ModelSource, Placement
from genserve.config.model_config import ModelConfig
from genserve.config.schema import model_config, new_model_config
from genserve.generation_metrics import Metrics
from genserve.inference import Inference, InferenceRequest, InferenceResponse, RequestFlags
from genserve.tensor import Tensor

__all__ = [
    "ON_CPU",
    "Asked",
    "answers",
    "ask",
    "assert_runs_concurrently",
    "assert_share_a_network",
    "config_of",
    "source_of",
    "started",
]

ON_CPU = Placement(name="m_0", kind="CPU")


def config_of(text: str, *, name: str = "m") -> ModelConfig:
    """Read a config.pbtxt."""
    return model_config(text_format.Parse(text, new_model_config()), name=name)


def source_of(config: ModelConfig, path: Path, *, version: int = 1) -> ModelSource:
    """The version in `<path>/<version>`."""
    return ModelSource(
        config=config, version=version, path=path, folder=path / str(version), server=None, metrics=Metrics()
    )


def started(backend, config: ModelConfig, path: Path, *, placement: Placement = ON_CPU):
    """Load a model and start one instance."""
    source = source_of(config, path)
    return backend(source, backend.load(source), placement)


@dataclass(kw_only=True)
class Asked:
    """A request and its responses."""

    inference: Inference = field(init=False)
    responses: list[InferenceResponse | None] = field(default_factory=list)
    finals: list[bool] = field(default_factory=list)

    def receive(self, response: InferenceResponse | None, final: bool) -> None:
        self.responses.append(response)
        self.finals.append(final)

    def outputs(self) -> dict[str, np.ndarray]:
        [response] = self.responses
        assert self.finals == [True]
        assert response.error is None, response.error
        return {tensor.name: tensor.array for tensor in response.outputs}


def ask(
    inputs, *, batch_size=1, outputs=(), states=None, types=None, sequence: int = 0, start: bool = False
) -> Asked:
    """Make a request of arrays by name, as it leaves the queue."""
    types = types or {}
    tensors = {name: Tensor(name, array, data_type=types.get(name)) for name, array in inputs.items()}
    request = InferenceRequest(
        model_name="m",
        inputs=tensors,
        requested_outputs=tuple(outputs),
        correlation_id=sequence,
        flags=RequestFlags.SEQUENCE_START if start else RequestFlags.NONE,
    )
    asked = Asked()
    asked.inference = Inference(
        request=request, on_response=asked.receive, batch_size=batch_size, states=states
    )
    return asked


def answers(backend, *batch: Asked) -> list[dict[str, np.ndarray]]:
    """Execute a batch; return the arrays of each response by name."""
    backend.execute([asked.inference for asked in batch])
    return [asked.outputs() for asked in batch]


def assert_share_a_network(backend, config: ModelConfig, path: Path) -> None:
    """Start two instances; assert that they use one network."""
    source = source_of(config, path)
    shared = backend.load(source)
    first = backend(source, shared, ON_CPU)
    second = backend(source, shared, Placement(name="m_1", kind="CPU"))
    assert first.network is second.network


def assert_runs_concurrently(backend, config: ModelConfig, path: Path, *, requests) -> None:
    """Run the same requests on instances of several threads; assert the results of a single instance."""
    source = source_of(config, path)
    shared = backend.load(source)
    alone = backend(source, shared, ON_CPU)
    expected = [answers(alone, ask(request))[0] for request in requests]

    def run(number: int):
        instance = backend(source, shared, Placement(name=f"m_{number}", kind="CPU"))
        return [answers(instance, ask(request))[0] for request in requests for _ in range(5)][::5]

    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(run, range(4)):
            for one, other in zip(found, expected, strict=True):
                for name, array in other.items():
                    np.testing.assert_allclose(one[name], array, rtol=1e-4, atol=1e-5)
