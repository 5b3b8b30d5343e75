"""Simulation of a text model: its engine, and its clients over HTTP and on threads."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from genserve.config.model_config import ModelConfig
from genserve.engine import disk_cache
from genserve.engine.admission_control import QueueLimits
from genserve.engine.block_files import BlockFiles
from genserve.engine.delta_streams import EventLoopSink
from genserve.engine.disk_cache import DiskCache, _state_key
from genserve.engine.engine_thread import EngineThread
from genserve.engine.generation_request import GenerationOutput, GenerationRequest
from genserve.engine.kv_cache_manager import max_tokens_per_sequence
from genserve.engine.prefix_cache import block_keys
from genserve.engine.speculation import Speculation
from genserve.engine.token_sequence import TokenSequence
from genserve.errors import GenserveError
from tests.simulation.simulated_disk import SimulatedDisk, SimulatedFiles
from tests.simulation.simulated_engine import GreedyDrafts, SimulatedEngine
from tests.simulation.simulated_logits import SimulatedLogits
from tests.simulation.simulated_repository import METRICS, Factory, Folders, SimulatedTextModel
from tests.simulation.simulation import HORIZON_S, Outcome, Simulation
from tests.simulation.text_clients import (
    LogitsLoop,
    TextCall,
    call_on_thread,
    call_over_http,
    error_name,
    is_deadline,
)
from tests.simulation.text_requests import LOOPS, SoloAnswer, TextRequests, solo_answers
from tests.simulation.virtual_threads import VirtualThread

TEXT = "text"
MAX_LENGTH = 48
_OTHER_WEIGHTS = 0x5A


class TextSimulation(Simulation):
    """A text model, its clients and their faults."""

    engine_class: type[SimulatedEngine] = SimulatedEngine
    engine_thread_class: type[EngineThread] = EngineThread

    def draw(self) -> None:
        """See `Simulation.draw`; each kind of fault occurs in a part of the seeds."""
        rng = self.rng
        kinds = ("nan", "raising_loop", "deadline", "beams", "grammar", "disconnect", "slow_reader")
        rates = {kind: rng.choice([0.0, 0.0, 0.1, 0.4]) for kind in kinds}
        self.max_num_seqs = rng.choice([1, 2, 3, 5])
        if self.max_num_seqs < 3:
            rates["beams"] = 0.0
        self.within_s = rng.choice([0.0, 0.01, 0.1, 1.0])
        self.requests = TextRequests(self.random(), within_s=self.within_s, rates=rates)
        self.calls = [TextCall(request=self.requests.draw()) for _ in range(rng.choice([2, 4, 7]))]
        self.thread_calls: list[TextCall] = []
        self.loops: list[LogitsLoop] = []
        self.decode = rng.choice(LOOPS)
        self.is_ample = rng.random() < 0.5
        self.exit_timeout_s = rng.choice([30.0, 30.0, 0.02])
        self.options: dict[str, Any] = {"exit_timeout_s": self.exit_timeout_s}
        self.folders = Folders({}, text_config=ModelConfig(name=TEXT, backend="simulated"))
        self.factory = Factory(self.folders, load_text=self._load, start_backend=None)
        self.engines: list[SimulatedEngine] = []
        self.engine_threads: list[EngineThread] = []
        self.failures_s: list[float] = []  # when forwards failed
        self._ends: set[tuple[GenerationRequest, int]] = set()
        self.has_disk_cache = rng.random() < 0.4
        self.disk = SimulatedDisk(
            self.random(),
            tear_rate=rng.choice([0.0, 0.3]),
            room=rng.choice([None, None, 0, 5]),
            sleep=self.threads.sleep,
            fault=self.fault,
        )

    def run(self) -> Outcome:
        """See `Simulation.run`."""
        with (
            TemporaryDirectory() as folder,
            patch.object(disk_cache, "BlockFiles", self._block_files),
        ):
            self.disk_folder = Path(folder)
            return super().run()

    def _block_files(self, folder: Path, **options: Any) -> SimulatedFiles:
        return SimulatedFiles(folder, disk=self.disk, **options)

    def started_on_loop(self) -> None:
        self.sink: CheckedSink = CheckedSink(self)

    def _load(self, name: str) -> SimulatedTextModel:
        rng = self.random()
        block_size = rng.choice([4, 8])
        longest = MAX_LENGTH // block_size
        model = SimulatedLogits(
            self.threads,
            self.random(),
            max_num_seqs=self.max_num_seqs,
            max_length=MAX_LENGTH,
            block_size=block_size,
            num_blocks=rng.randint(longest, max(longest, self.max_num_seqs * longest * 2 // 3)),
            num_state_slots=rng.choice([0, 0, 2, 3, 4]) * self.max_num_seqs,
            failure_rate=rng.choice([0.0, 0.0, 0.0, 0.05]),
            on_failure=self._forward_failed,
            weights=(weights := rng.choice([0, 0, _OTHER_WEIGHTS])),  # a reload may change them
        )
        metrics = METRICS.for_model(name)
        prefix_cache = rng.random() < 0.8
        disk = None
        if prefix_cache and self.has_disk_cache:
            if not self.engines:
                self._leave_files(model, weights=rng.choice([weights, weights ^ _OTHER_WEIGHTS]))
            disk = DiskCache(
                model,
                name=name,
                block_size=block_size,
                fingerprint=_fingerprint(weights),
                metrics=metrics,
                folder=self.disk_folder,
                max_bytes=1 << 30,
            )
        speculation = None
        if rng.random() < 0.4:
            failure_rate = rng.choice([0.0, 0.0, 0.02])
            error_rate = rng.choice([0.0, 0.3])
            speculation = Speculation(
                GreedyDrafts(self.random(), error_rate=error_rate, failure_rate=failure_rate)
            )
        dies_at_step = rng.randint(1, 12) if rng.random() < 0.03 else None
        engine = self.engine_class(
            model,
            report=self.report,
            dies_at_step=dies_at_step,
            decode=self.decode,
            max_num_batched_tokens=rng.choice([8, 16, 64]),
            prefix_cache=prefix_cache,
            disk_cache=disk,
            speculation=speculation,
            clock=lambda: self.now_s,
        )
        limits = QueueLimits(max_requests=1000)
        if not self.is_ample:
            limits = QueueLimits(
                max_requests=rng.choice([1, 3, 6]),
                max_tokens=rng.choice([None, 40]),
                max_wait_s=rng.choice([None, 0.05, 0.5]),
            )
        if dies_at_step is not None:
            self.disturbed = True
            self.faults["engine"] += 1
        thread = self.engine_thread_class(
            engine,
            name=name,
            max_num_seqs=self.max_num_seqs,
            limits=limits,
            metrics=metrics,
            sequences_of=partial(_sequences_of, engine),
        )
        self.engines.append(engine)
        self.engine_threads.append(thread)
        return SimulatedTextModel(name, thread, max_length=MAX_LENGTH)

    def _leave_files(self, model: SimulatedLogits, *, weights: int) -> None:
        """Write the files of an earlier server, whose model had these weights; some are torn."""
        files = BlockFiles(self.disk_folder, fingerprint=_fingerprint(weights))
        size = model.block_size
        for stem in self.requests.stems:
            for index, key in enumerate(block_keys(stem, block_size=size), 1):
                before = stem[: index * size]
                rows = {key: model.block_after(before), _state_key(key): model.state_after(before)}
                for name, row in rows.items():
                    files.write([name], (row ^ np.uint8(weights))[np.newaxis])
        for path in self.disk_folder.rglob("*.kv"):
            self.disk.after_write(path)

    def _forward_failed(self) -> None:
        self.fault("forward")
        self.failures_s.append(self.now_s)

    def start_threads(self) -> list[VirtualThread]:
        """See `Simulation.start_threads`."""
        rng, engine = self.random(), self.engine_threads[0]
        threads = []
        for _ in range(rng.choice([0, 0, 1, 3])):
            prompt = self.requests.prompt()[:20]
            loop = LogitsLoop(engine, self.random(), prompt, max_length=MAX_LENGTH)
            self.loops.append(loop)
            run = partial(
                loop.run,
                num_calls=rng.randint(1, 8),
                sleep=self.threads.sleep,
                cancel_rate=rng.choice([0.0, 0.1]),
            )
            threads.append(VirtualThread(run, "logits-loop"))
        if rng.random() < 0.2:
            call = TextCall(request=self.requests.draw_single())
            self.thread_calls.append(call)
            run = partial(
                call_on_thread,
                call,
                engine,
                sleep=self.threads.sleep,
                now_s=lambda: self.now_s,
                leaves_after=rng.choice([None, 1, 2]),
            )
            threads.append(VirtualThread(run, "reader"))
        return threads

    async def serve(self) -> None:
        """See `Simulation.serve`."""
        tasks = [
            asyncio.ensure_future(call_over_http(call, self, model=TEXT, now_s=lambda: self.now_s))
            for call in self.calls
        ]
        for task, call in zip(tasks, self.calls, strict=True):
            try:
                await task
            except Exception:
                self.report(f"a client saw {traceback.format_exc()}")
            self.note(f"ended: {call.error or [choice.finish_reason for choice in call.choices]}")

    def check(self) -> None:
        """Check that each client has the right answer, or an error that was to be expected."""
        for call in (*self.calls, *self.thread_calls):
            self._check_call(call)
        for loop in self.loops:
            self.faults["cancel"] += loop.num_cancelled
            for problem in loop.problems:
                self.report(problem)

    def _check_call(self, call: TextCall) -> None:
        for problem in call.problems:
            self.report(problem)
        self._count_faults(call)
        if not call.request.is_valid:
            if call.error is None and not call.left:
                self.report("an invalid request was answered")
            return
        width = call.request.params.beam_width or 2
        lengths = dict.fromkeys(max_tokens_per_sequence(engine.model, width) for engine in self.engines)
        alone = [
            solo_answers(call.request, decode=self.decode, max_length=MAX_LENGTH, max_beam_length=length)
            for length in lengths
        ]
        if call.error is not None:
            self._check_error(call, {one.error.__name__ for answers in alone for one in answers if one.error})
        elif not any(_agrees(call, answers) for answers in alone):
            self.report(f"an answer differs from that of the request alone: {call.choices}, not {alone}")

    def _count_faults(self, call: TextCall) -> None:
        request = call.request
        self.faults["disconnect"] += call.left
        self.faults["slow reader"] += request.read_s > 0
        self.faults["stalled reader"] += request.stalls
        is_late = call.error is not None and error_name(call.error) == "DeadlineExceeded"
        self.faults["deadline"] += is_late or any(map(is_deadline, call.choices))
        self.faults["overload"] += call.error is not None and error_name(call.error) == "Overloaded"
        self.faults["invalid request"] += not request.is_valid
        self.faults["poisoned request"] += request.is_poisoned

    def _check_error(self, call: TextCall, expected: set[str]) -> None:
        assert call.error is not None
        name = error_name(call.error)
        limits = [thread.capacity for thread in self.engine_threads]
        if name in expected or (name == "InvalidRequest" and call.request.num_choices > min(limits)):
            return
        if name == "Overloaded" and not self.is_ample:
            return
        # Times are whole microseconds.
        waited_s, limit_ms = round(call.ended_s - call.began_s, 6), call.request.params.max_time_ms
        if name == "DeadlineExceeded" and limit_ms is not None and waited_s >= limit_ms / 1000:
            return
        failed = any(call.began_s <= when_s <= call.ended_s for when_s in self.failures_s)
        if name == "ModelFailed" and (failed or self.disturbed):
            return
        # A reader on a thread knows the engine, not the model; a short time to exit is too short for some.
        is_cut = self.faults["reload"] and (self.exit_timeout_s < 1 or call in self.thread_calls)
        if name in ("Closed", "ModelNotReady") and (self.disturbed or is_cut):
            return
        self.report(f"an unexpected error: {name}: {call.error}")

    def check_idle(self) -> None:
        """See `Simulation.check_idle`."""
        for thread in self.engine_threads:
            thread.drain(timeout_s=HORIZON_S)
        for engine, thread in zip(self.engines, self.engine_threads, strict=True):
            if thread.num_accepted or thread.num_preparing:
                self.report(
                    f"{thread.num_accepted} requests never ended; {thread.num_preparing} are prepared"
                )
            if thread.alive and not engine.is_empty:
                self.report("an idle engine holds blocks, loops or drafts")
        if self.sink.num_streams:
            self.report(f"{self.sink.num_streams} streams are left")

    def check_closed(self) -> None:
        """See `Simulation.check_closed`."""
        for engine in self.engines:
            if not engine.is_empty and not self.faults["engine"]:
                self.report("a closed engine holds blocks, loops or drafts")
            if engine.disk_cache is not None and engine.disk_cache._work._items:
                self.report("a closed disk cache holds copies")

    def num_requests(self) -> int:
        """See `Simulation.num_requests`."""
        return len(self.calls) + len(self.thread_calls) + sum(loop.num_asked for loop in self.loops)

    def open_requests(self) -> str:
        """See `Simulation.open_requests`."""
        calls = (*self.calls, *self.thread_calls)
        return f"{sum(bool(call.began_s and not call.ended_s) for call in calls)} requests never ended"

    def check_outputs(self, outputs: Sequence[GenerationOutput]) -> None:
        """Check that no choice has an output after its end, and that none ends late."""
        for request, choice, content, _ in outputs:
            if (request, choice) in self._ends:
                self.report("an output after the end of a choice")
            if isinstance(content, GenserveError) or content.finish_reason is not None:
                self._ends.add((request, choice))
                self._check_deadline(request)

    def _check_deadline(self, request: GenerationRequest) -> None:
        """Check that a choice ended by its deadline, or with the step after the one that ran then."""
        step_s = max(engine.model.longest_step_s(64) for engine in self.engines)
        deadline_s = request.deadline_s
        if deadline_s is not None and self.now_s > deadline_s + 2 * step_s + 0.001:
            self.report(f"a choice ended {self.now_s - deadline_s:.3f} s after its deadline")


def _fingerprint(weights: int) -> str:
    return f"{weights:032x}"


def _sequences_of(engine: SimulatedEngine, request: GenerationRequest) -> list[TokenSequence]:
    """Return the sequences of a request, whose prompt is that of the client."""
    asked: Any = request.prompt
    sequences = asked.sequences(
        max_length=MAX_LENGTH,
        deadline_s=request.deadline_s,
        max_beam_length=max_tokens_per_sequence(engine.model, request.params.beam_width or 2),
    )
    for choice, sequence in enumerate(sequences):
        sequence.request, sequence.choice = request, choice
    return list(sequences)


class CheckedSink(EventLoopSink):
    """The sink of a simulation's event loop, which checks what it passes on."""

    def __init__(self, simulation: TextSimulation) -> None:
        super().__init__(simulation.loop)
        self._simulation = simulation

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def deliver(self, outputs: Sequence[GenerationOutput]) -> None:
        self._simulation.check_outputs(outputs)
        super().deliver(outputs)


def _agrees(call: TextCall, answers: Sequence[SoloAnswer]) -> bool:
    """Whether a client has received the answers of the request alone, up to where it stopped reading."""
    params = call.request.params
    limit_s = math.inf if params.max_time_ms is None else params.max_time_ms / 1000
    # Times are whole microseconds, which a difference of floats may miss.
    if params.use_beam_search and round(call.ended_s - call.began_s, 6) >= limit_s:
        return True  # the best so far, which may be complete
    for choice, answer in zip(call.choices, answers, strict=True):
        is_cut = is_deadline(choice) and params.max_time_ms is not None
        if is_cut or (call.left and choice.finish_reason is None):
            if answer.token_ids[: len(choice.token_ids)] != choice.token_ids:
                return False
            continue
        right = (answer.token_ids, answer.finish_reason, answer.stop_reason)
        if answer.error is not None or (choice.token_ids, choice.finish_reason, choice.stop_reason) != right:
            return False
    return True
