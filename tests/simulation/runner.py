"""Runner: simulates many seeds, in several processes, and adds up their results."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.simulation.on_demand_simulation import OnDemandSimulation
from tests.simulation.simulation import Outcome
from tests.simulation.tensor_simulation import TensorSimulation
from tests.simulation.text_simulation import TextSimulation
from tests.simulation.virtual_threads import virtual_product

_CHUNK = 100
_SEEDS_PER_COLLECTION = 50  # seeds between garbage collections, which Python would run too often


@dataclass(slots=True, kw_only=True)
class Summary:
    """The results of some seeds."""

    num_seeds: int = 0
    num_requests: int = 0
    num_switches: int = 0
    simulated_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one seed."""
        self.num_seeds += 1
        self.num_requests += outcome.num_requests
        self.num_switches += outcome.num_switches
        self.simulated_s += outcome.simulated_s
        self.faults += outcome.faults
        if outcome.problems:
            self.failed.append(outcome)

    def merge(self, other: Summary) -> None:
        """Add the seeds of another summary."""
        self.num_seeds += other.num_seeds
        self.num_requests += other.num_requests
        self.num_switches += other.num_switches
        self.simulated_s += other.simulated_s
        self.faults += other.faults
        self.failed += other.failed


def simulate(seed: int, *, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run the simulation of a seed, within `virtual_product`."""
    kinds = (TextSimulation, TextSimulation, TensorSimulation, TensorSimulation, OnDemandSimulation)
    return kinds[seed % 5](seed, trace=trace).run()


def summary_of(seeds: Iterable[int]) -> Summary:
    """Simulate seeds in this process."""
    summary = Summary()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with virtual_product():
            for index, seed in enumerate(seeds):
                summary.add(simulate(seed))
                if index % _SEEDS_PER_COLLECTION == 0:
                    gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    return summary


def fingerprints(seeds: Iterable[int]) -> list[float]:
    """Return a number for each seed, which differs if anything happens in another order."""
    with virtual_product():
        return [simulate(seed).fingerprint for seed in seeds]


def summaries(seeds: Sequence[int], *, num_processes: int) -> Iterator[Summary]:
    """Simulate seeds in several processes; yield the summaries of parts as they end."""
    parts = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(summary_of, part) for part in parts]):
            yield future.result()


def failure_line(outcome: Outcome) -> str:
    """Return one line: what a seed violates, and how to replay it."""
    problem = outcome.problems[0].strip().splitlines()[-1]
    return (
        f"seed {outcome.seed}: {problem} (replay: python -m tests.simulation --seed {outcome.seed} --trace)"
    )
