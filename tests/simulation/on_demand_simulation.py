"""Simulation of models that requests load: a memory budget, loads that fail, and clients that leave."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

from genserve.config.model_config import InstanceGroup
from genserve.errors import GenserveError, Overloaded
from genserve.inference import Inference, InferenceRequest
from genserve.repository import on_demand
from genserve.repository.options import ControlMode
from tests.simulation.simulated_repository import Factory, Folders
from tests.simulation.simulation import Outcome, Simulation
from tests.simulation.tensor_models import SimulatedBackend, input_of, right_answer, tensor_config
from tests.simulation.tensor_simulation import TensorCall
from tests.simulation.virtual_threads import VirtualThread


class OnDemandSimulation(Simulation):
    """Some models, a budget for a part of them, and clients that use all."""

    pinned = ()
    failure_rate = death_rate = 0.0     # of executions

    def draw(self) -> None:
        """See `Simulation.draw`."""
        rng = self.rng
        self.sizes = {name: rng.randint(1, 3) for name in ("a", "b", "c", "d")[: rng.randint(2, 4)]}
        self.budget = rng.choice([3, 3, 4, 100])
        self.within_s = rng.choice([0.0, 0.02, 0.3])
        self.load_failure_rate = rng.choice([0.0, 0.0, 0.3])
        self.leaving_rate = rng.choice([0.0, 0.3])
        self.max_queue = rng.choice([1, 100])
        self.options: dict[str, Any] = {
            "control_mode": ControlMode.ON_DEMAND,
            "memory_budget_bytes": self.budget,
            "keep_alive_s": rng.choice([0.0, 0.1, 10.0]),
            "max_queue": self.max_queue,
        }
        group = InstanceGroup(name="", kind="KIND_CPU", count=1)
        configs = {name: tensor_config(name, group) for name in self.sizes}
        self.folders = Folders(configs, text_config=None)
        self.factory = Factory(self.folders, load_text=None, start_backend=partial(_SizedBackend, self))
        self.calls: list[TensorCall] = []
        self.submitted_ns: dict[Inference, int] = {}
        self.loaded: Counter[str] = Counter()
        self.used: Counter[str] = Counter()
        self._num_asked = self._num_ended = 0

    def run(self) -> Outcome:
        """See `Simulation.run`."""
        with (
            patch.object(on_demand, "_files_bytes", lambda entry: self.sizes[entry.name]),
            patch.object(on_demand, "own_memory_bytes", lambda: 0),
        ):
            return super().run()

    def use(self, count: int) -> None:
        """The models share no resources."""

    def check_execution(self, batch: object) -> None:
        """Any batch is right."""

    def start_threads(self) -> list[VirtualThread]:
        """See `Simulation.start_threads`."""
        return [
            VirtualThread(partial(self._ask, self.random()), f"client-{number}")
            for number in range(self.rng.choice([2, 4, 8]))
        ]

    async def serve(self) -> None:
        """See `Simulation.serve`: all clients are threads."""

    def _ask(self, rng: Random) -> None:
        """Use models one after the other, and leave some loads before they end."""
        assert self.repository.on_demand is not None
        for _ in range(rng.randint(1, 3)):
            self.threads.sleep(rng.random() * self.within_s)
            name = rng.choice(list(self.sizes))
            self._num_asked += 1
            future = self.repository.on_demand.use(name, keep_alive_s=rng.choice([None, None, 0.0, 0.05]))
            if rng.random() < self.leaving_rate:
                self.threads.sleep(rng.choice([0.0, 0.001, 0.02]))
            if rng.random() < self.leaving_rate and future.cancel():
                self.fault("client leaves")
            else:
                try:
                    use = future.result()
                except GenserveError as error:
                    self._check_error(name, error)
                else:
                    self._infer(rng, name)
                    use.end()
            self._num_ended += 1

    def _infer(self, rng: Random, name: str) -> None:
        self.used[name] += 1
        value = float(rng.randrange(100))
        request = InferenceRequest(model_name=name, inputs=input_of(value, is_batched=False))
        call = TensorCall(self, request, value)
        if call.submit() is not None:
            call.ended.wait()
        if call.error is not None or call.values != [right_answer(value)]:
            self.report(f"model {name}, which is in use, answered {call.error or call.values}")
        self.threads.sleep(rng.choice([0.0, 0.01, 0.3]))
        self.used[name] -= 1

    def _check_error(self, name: str, error: GenserveError) -> None:
        expected = (
            ("injected" in str(error) and self.faults["load failure"])
            or (isinstance(error, Overloaded) and self.max_queue == 1)
            or ("memory budget" in str(error) and self.sizes[name] > self.budget)
        )
        if not expected:
            self.report(f"an unexpected error: {error}")

    def _operate(self, rng: Random) -> None:
        """Unload models that others may use or wait for."""
        for _ in range(rng.randint(1, 3)):
            self.threads.sleep(rng.random() * self.within_s * 2)
            self.fault("unload")
            self.repository.unload(rng.choice(list(self.sizes)))

    def started(self, name: str) -> None:
        """Count a model that is loaded, and check that all fit into the budget."""
        self.loaded[name] += 1
        taken = sum(self.sizes[one] * count for one, count in self.loaded.items())
        if taken > self.budget:
            self.report(f"the models take {taken} of {self.budget}")

    def ended(self, name: str) -> None:
        """Count a model that is unloaded, and check that nothing uses it."""
        self.loaded[name] -= 1
        if self.used[name]:
            self.report(f"model {name} was unloaded while it was used")

    def check(self) -> None:
        """See `Simulation.check`: answers are checked as they come."""

    def check_idle(self) -> None:
        """See `Simulation.check_idle`."""
        assert self.repository.on_demand is not None
        self.threads.sleep(1.0)
        if self.repository.on_demand.num_waiting:
            self.report("requests still wait for loads")
        for name, count in self.loaded.items():
            if count not in (0, 1):
                self.report(f"model {name} is loaded {count} times")

    def check_closed(self) -> None:
        """See `Simulation.check_closed`."""
        if +self.loaded:
            self.report(f"models are left: {+self.loaded}")

    def num_requests(self) -> int:
        """See `Simulation.num_requests`."""
        return self._num_asked

    def open_requests(self) -> str:
        """See `Simulation.open_requests`."""
        return f"{self._num_asked - self._num_ended} requests never ended"


class _SizedBackend(SimulatedBackend):
    """Counts what is loaded."""

    def __init__(self, simulation: OnDemandSimulation, source: Any, placement: Any) -> None:
        super().__init__(simulation, source, placement)
        self._simulation: OnDemandSimulation = simulation
        simulation.started(self._config.name)

    def close(self) -> None:
        super().close()
        self._simulation.ended(self._config.name)
