"""Simulation: one server with all its threads, clients and faults, drawn by a seed and checked to the end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from genserve.batching import queue_scheduler
from genserve.engine.delta_streams import EventLoopSink
from genserve.errors import GenserveError
from genserve.repository.model_versions import ModelState
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from genserve.server.kserve.running_inference import ResponseDispatcher
from genserve.server.services import RunningAnswers, Services
from tests.simulation.simulated_repository import Factory, Folders, models_in_memory
from tests.simulation.virtual_event_loop import VirtualEventLoop
from tests.simulation.virtual_threads import Stuck, VirtualThread, VirtualThreads, virtual_threads

HORIZON_S = 3600.0
_GRACE_S = 1.0  # for the remaining work when all clients are served
_QUIET = logging.CRITICAL + 1


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of one seed."""

    seed: int
    problems: list[str]
    simulated_s: float = 0.0
    num_requests: int = 0
    num_switches: int = 0  # switches between threads
    faults: Counter[str] = field(default_factory=Counter)
    fingerprint: float = 0.0  # equal for equal simulations


class Simulation:
    """One simulated server; `run` returns what is wrong with it.

    Attributes:
        threads: the threads of the server and its clients.
        faults: how many faults of each kind were injected.
        disturbed: requests may fail, because a model was unloaded, the server stopped, or its thread died.
    """

    threads: VirtualThreads
    folders: Folders
    factory: Factory
    sink: EventLoopSink
    options: dict[str, Any]
    check_running = Services.check_running
    pinned: Sequence[str] | None = None  # the models that are loaded at the start; None: all
    within_s: float  # in which the requests arrive

    def __init__(self, seed: int, *, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.faults: Counter[str] = Counter()
        self.disturbed = False
        self.draining = False  # used by handlers, as of `Services`
        self.is_local = True
        self.answers = RunningAnswers()
        self._trace = trace

    def output_sink(self) -> EventLoopSink:
        """Return the sink of the event loop; for handlers, as `Services` has it."""
        return self.sink

    @property
    def now_s(self) -> float:
        return self.threads.now_ns / 1e9

    def random(self) -> Random:
        """Return a generator of its own for a part of the simulation."""
        return Random(self.rng.random())

    def report(self, problem: str) -> None:
        """Record a violation."""
        self.threads.report(f"{self.now_s:.6f} s: {problem}")

    def note(self, text: str) -> None:
        """Write a line of the trace."""
        if self._trace is not None:
            name = self.threads.running.name if self.threads.running else "-"
            self._trace(f"{self.now_s:11.6f} {name:20} {text}")

    def fault(self, kind: str) -> None:
        """Count an injected fault."""
        self.faults[kind] += 1
        self.note(f"fault: {kind}")

    def run(self) -> Outcome:
        """Run the simulation, within `virtual_product`."""
        disabled = logging.root.manager.disable
        if self._trace is None:
            logging.disable(_QUIET)
        try:
            switch_rate = self.rng.choice([0.0, 0.1, 0.5])
            with virtual_threads(self.random(), switch_rate=switch_rate) as self.threads:
                self.draw()
                queue_scheduler._TIMER = queue_scheduler.Timer()
                with models_in_memory(self.factory):
                    try:
                        self.threads.run(self._main)
                    except Stuck as stuck:
                        self.threads.report(f"{stuck}; {self.open_requests()}")
                return Outcome(
                    seed=self.seed,
                    problems=self.threads.problems,
                    simulated_s=self.now_s - 1.0,
                    num_requests=self.num_requests(),
                    num_switches=self.threads.num_switches,
                    faults=+self.faults,
                    fingerprint=self.rng.random() + self.threads.num_switches + self.now_s,
                )
        finally:
            logging.disable(disabled)

    # What the kinds of simulations implement.

    def draw(self) -> None:
        """Draw the models, the load and the faults; sets `folders`, `factory` and `options`."""
        raise NotImplementedError

    def started_on_loop(self) -> None:
        """Make what needs the event loop."""

    def start_threads(self) -> list[VirtualThread]:
        """Start the clients on threads."""
        raise NotImplementedError

    async def serve(self) -> None:
        """Run the clients on the event loop."""
        raise NotImplementedError

    def check(self) -> None:
        """Check the answers, when all clients are served."""
        raise NotImplementedError

    def check_idle(self) -> None:
        """Check that no request has left anything behind."""
        raise NotImplementedError

    def check_closed(self) -> None:
        """Check that nothing is left when the repository is closed."""

    def num_requests(self) -> int:
        raise NotImplementedError

    def open_requests(self) -> str:
        """Return which requests have not ended."""
        raise NotImplementedError

    def _main(self) -> None:
        options = RepositoryOptions(**{"control_mode": ControlMode.EXPLICIT, **self.options})
        self.repository = Repository([], options=options)
        self.repository.start(self.pinned)
        rng = self.random()
        self.loop = VirtualEventLoop(self.threads, rng, overtaking_rate=rng.choice([0.0, 0.2]))
        self.dispatcher = ResponseDispatcher(self.loop)
        self.started_on_loop()
        threads = self.start_threads()
        for _ in range(rng.choice([0, 0, 1, 2])):
            threads.append(VirtualThread(lambda: self._operate(self.random()), "operator"))
        for thread in threads:
            thread.start()
        self.loop.run_until_complete(self._serve())
        for thread in threads:
            thread.join()
        self.check()
        self._stop()

    async def _serve(self) -> None:
        draining = None
        if self.rng.random() < 0.1:
            draining = asyncio.ensure_future(self._drain(self.rng.random() * self.within_s))
        await self.serve()
        if draining is not None:
            await draining
        await asyncio.sleep(0)
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            _, pending = await asyncio.wait(others, timeout=_GRACE_S)
            if pending:
                self.report(f"tasks are left: {pending}")

    async def _drain(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self.fault("drain")
        self.draining = self.disturbed = True

    def _operate(self, rng: Random) -> None:
        """Reload and unload models."""
        for _ in range(rng.randint(1, 3)):
            self.threads.sleep(rng.random() * self.within_s * 2)
            name = rng.choice(list(self.folders.changes))
            kind = rng.choice(["reload", "reload", "reload", "unload", "load"])
            self.fault(kind)
            try:
                if kind == "unload":
                    self.disturbed = True
                    self.repository.unload(name)
                else:
                    if kind == "reload":
                        self.folders.change(name)
                    self.repository.load(name)
            except GenserveError as error:
                self.load_failed(error)

    def load_failed(self, error: GenserveError) -> None:
        """Judge a load that failed."""
        self.report(f"a load failed: {error}")

    def _stop(self) -> None:
        """Check that everything is back, close the repository, and check that all threads have ended."""
        self.repository.lifecycle._unloader.join()
        self.check_idle()
        for entry in self.repository.index():
            if entry.state not in (ModelState.READY, ModelState.UNAVAILABLE, None):
                self.report(f"{entry.name} is still {entry.state}")
        self.repository.close()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        self.check_closed()
        if self._living():
            self.threads.sleep(_GRACE_S)
        if living := self._living():
            self.report(f"threads have not ended: {living}")

    def _living(self) -> list[str]:
        return [t.name for t in self.threads.started if t.alive and t.name not in ("main", "timer")]
