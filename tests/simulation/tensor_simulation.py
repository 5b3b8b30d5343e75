"""Simulation of models of tensors: their schedulers, their rate limiter, and clients that share them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from genserve.batching.rate_limiter import ResourceCapacity
from genserve.config.model_config import QueuePolicy
from genserve.errors import GenserveError
from genserve.inference import Inference, InferenceRequest, InferenceResponse
from genserve.server.kserve.running_inference import RunningInference
from tests.simulation.simulated_repository import Factory, Folders
from tests.simulation.simulation import Simulation
from tests.simulation.tensor_models import (
    CAPACITY,
    RESOURCE,
    SimulatedBackend,
    draw_config,
    input_of,
    num_responses,
    position,
    right_answer,
)
from tests.simulation.virtual_threads import Event, VirtualThread

# By words of the message: what must have happened for an error to be expected.
_REJECTED, _EXPIRED, _CANCELLED = "Exceeds maximum queue size", "timeout", "cancelled"


class TensorCall:
    """A running inference, and the responses that its requester has received."""

    def __init__(self, simulation: TensorSimulation, request: InferenceRequest, value: float) -> None:
        self.request = request
        self.value = value
        self.responses: list[InferenceResponse] = []
        self.rejection: GenserveError | None = None
        self.num_ends = 0
        self.is_cancelled = False
        self.submitted_s = simulation.now_s
        self.ended = Event()
        self._simulation = simulation
        simulation.calls.append(self)

    @property
    def error(self) -> GenserveError | None:
        """The error with which it was rejected or has failed."""
        return self.rejection or next((r.error for r in self.responses if r.error is not None), None)

    @property
    def values(self) -> list[float]:
        """The answers."""
        return [float(tensor.array.sum()) for r in self.responses for tensor in r.outputs]

    def on_response(self, response: InferenceResponse | None, final: bool) -> None:
        """Record a response; see `OnResponse`."""
        if self.num_ends:
            self._simulation.report("a response after the end of an inference")
        if response is not None:
            self.responses.append(response)
        if final:
            self.num_ends += 1
            self.ended.set()

    def submit(self) -> Inference | None:
        """Submit it; None: it was rejected."""
        inference = Inference(request=self.request, on_response=self.on_response)
        self._simulation.submitted_ns[inference] = self._simulation.threads.now_ns
        try:
            self._simulation.repository.submit(inference)
        except GenserveError as error:
            self.rejection = error
            self.num_ends += 1
            if self.responses:
                self._simulation.report("an inference was rejected after it was answered")
            return None
        return inference


class TensorSimulation(Simulation):
    """Two models, which share a rate limiter, and their clients."""

    def draw(self) -> None:
        """See `Simulation.draw`."""
        rng = self.rng
        self.configs = {name: draw_config(rng, name) for name in ("first", "second")[: rng.randint(1, 2)]}
        self.within_s = rng.choice([0.0, 0.0, 0.02, 0.3])
        self.failure_rate = rng.choice([0.0, 0.0, 0.1])
        self.death_rate = rng.choice([0.0, 0.0, 0.0, 0.05])
        self.load_failure_rate = 0.0
        self.cancel_rate = rng.choice([0.0, 0.0, 0.2])
        self.exit_timeout_s = rng.choice([30.0, 30.0, 0.02])
        self.options: dict[str, Any] = {"exit_timeout_s": self.exit_timeout_s}
        if rng.random() < 0.4:
            capacities = (ResourceCapacity(name=RESOURCE, count=CAPACITY),)
            self.options |= {"rate_limiter": True, "resources": capacities}
        self.folders = Folders(self.configs, text_config=None)
        self.factory = Factory(self.folders, load_text=None, start_backend=partial(SimulatedBackend, self))
        self.calls: list[TensorCall] = []
        self.submitted_ns: dict[Inference, int] = {}
        self.lost_sequences: set[int | str] = set()
        self._num_used = 0

    def use(self, count: int) -> None:
        """Count the resources that executing instances hold."""
        self._num_used += count
        if "rate_limiter" in self.options and not 0 <= self._num_used <= CAPACITY:
            self.report(f"instances hold {self._num_used} of {CAPACITY} resources")

    def check_execution(self, batch: Sequence[Inference]) -> None:
        """Check that no request of a batch has ended or should be rejected, and that all fit together."""
        for inference in batch:
            if inference.ended and not self.disturbed and self.exit_timeout_s > 1:
                self.report("an inference is executed after its end")
            if inference not in self.submitted_ns:
                continue  # submitted by the event loop, or a null request
            batching = self.configs[inference.request.model_name].dynamic_batching
            policy = batching.default_queue_policy if batching else QueuePolicy()
            waited_ns = self.threads.now_ns - self.submitted_ns[inference]
            if (
                policy.default_timeout_us
                and not policy.delays
                and waited_ns > policy.default_timeout_us * 1000
            ):
                self.report("an inference is executed after its time in the queue")

    def start_threads(self) -> list[VirtualThread]:
        """See `Simulation.start_threads`."""
        rng = self.random()
        self.load_failure_rate = rng.choice([0.0, 0.0, 0.2])  # for all loads but the first
        threads = []
        for number in range(1, rng.choice([2, 4, 8])):
            name = rng.choice(list(self.configs))
            run = self._send_sequence if self.configs[name].sequence_batching else self._send_single
            threads.append(VirtualThread(partial(run, self.random(), name, number), f"client-{number}"))
        return threads

    def _request(self, rng: Random, name: str, value: float, **options: Any) -> InferenceRequest:
        is_batched = self.configs[name].max_batch_size > 0
        return InferenceRequest(
            model_name=name,
            inputs=input_of(value, is_batched=is_batched),
            timeout_us=rng.choice([0, 0, 2000]),
            **options,
        )

    def _send_single(self, rng: Random, name: str, _number: int) -> None:
        """Send some requests, several at a time."""
        self.threads.sleep(rng.random() * self.within_s)
        calls = []
        for _ in range(rng.randint(1, 4)):
            value = float(rng.randrange(100))
            call = TensorCall(self, self._request(rng, name, value, priority=rng.choice([0, 1, 2])), value)
            inference = call.submit()
            if inference is not None:
                calls.append(call)
                self._cancel_sometimes(rng, call, inference)
            self.threads.sleep(rng.choice([0.0, 0.0, 0.001]))
        for call in calls:
            call.ended.wait()

    def _send_sequence(self, rng: Random, name: str, number: int) -> None:
        """Send the requests of a sequence; one after the other, or without waiting."""
        self.threads.sleep(rng.random() * self.within_s)
        length, waits, total = rng.randint(1, 4), rng.random() < 0.5, 0.0
        calls: list[TensorCall] = []
        for index in range(length):
            value = float(rng.randrange(100))
            total += value
            options = {"correlation_id": number, "flags": position(index, length)}
            call = TensorCall(self, self._request(rng, name, value, **options), total)
            inference = call.submit()
            if inference is None:
                break
            calls.append(call)
            if self._cancel_sometimes(rng, call, inference):
                self.lost_sequences.add(number)
            if waits:
                call.ended.wait()
                self.threads.sleep(rng.choice([0.0, 0.001]))
        for call in calls:
            call.ended.wait()

    def _cancel_sometimes(self, rng: Random, call: TensorCall, inference: Inference) -> bool:
        if rng.random() >= self.cancel_rate:
            return False
        call.is_cancelled = True
        self.fault("cancel")
        delay_s = rng.choice([0.0, 0.0, 0.001, 0.03])

        def cancel() -> None:
            self.threads.sleep(delay_s)
            inference.cancel()

        VirtualThread(cancel, "canceller").start()
        return True

    async def serve(self) -> None:
        """See `Simulation.serve`: clients on the event loop, some of which leave."""
        rng = self.random()
        names = [name for name, config in self.configs.items() if config.sequence_batching is None]
        if names:
            count = rng.choice([0, 1, 3])
            await asyncio.gather(*(self._infer(self.random(), rng.choice(names)) for _ in range(count)))

    async def _infer(self, rng: Random, name: str) -> None:
        await asyncio.sleep(rng.random() * self.within_s)
        value = float(rng.randrange(100))
        call = TensorCall(self, self._request(rng, name, value), value)
        try:
            running = RunningInference(call.request, server=self.repository, dispatcher=self.dispatcher)
        except GenserveError as error:
            call.rejection = error
            call.num_ends = 1
            return
        leaves_s = rng.choice([0.001, 0.02]) if rng.random() < self.cancel_rate else None
        try:
            async with asyncio.timeout(leaves_s):
                with running:
                    async for response in running.responses:
                        call.responses.append(response)
                    call.num_ends = 1
        except TimeoutError:
            self.fault("disconnect")
            call.is_cancelled = True
            call.num_ends = 1

    def check(self) -> None:
        """See `Simulation.check`."""
        # The sums of a sequence are wrong after a request that failed.
        failed = (call.request.correlation_id for call in self.calls if call.error is not None)
        self.lost_sequences.update(failed)
        for call in self.calls:
            self._check_call(call)

    def _check_call(self, call: TensorCall) -> None:
        config = self.configs[call.request.model_name]
        if call.num_ends != 1:
            self.report(f"an inference ended {call.num_ends} times")
        if call.error is not None:
            self._check_error(call, call.error)
        elif call.is_cancelled:
            return  # it may have been executed nevertheless
        elif config.sequence_batching is not None:
            is_lost = call.request.correlation_id in self.lost_sequences
            if len(call.values) != 1 or (call.values != [call.value] and not is_lost):
                self.report(f"a sequence got {call.values}, not {call.value}")
        else:
            count = num_responses(call.value) if config.decoupled else 1
            if call.values != [right_answer(call.value)] * count:
                self.report(f"an inference got {call.values}, not {count} times {right_answer(call.value)}")

    def _check_error(self, call: TensorCall, error: GenserveError) -> None:
        config, message = self.configs[call.request.model_name], str(error)
        policy = config.dynamic_batching.default_queue_policy if config.dynamic_batching else None
        is_lost = call.is_cancelled or call.request.correlation_id in self.lost_sequences
        is_cut = self.disturbed or (self.faults["reload"] and self.exit_timeout_s < 1)
        is_sequence = config.sequence_batching is not None
        expected = (
            is_cut
            or ("injected" in message and self.faults["failed execution"])
            or (_REJECTED in message and policy is not None and policy.max_queue_size)
            or (_EXPIRED in message and (policy is None or policy.default_timeout_us))
            or (_CANCELLED in message and is_lost)
            # A sequence may end before its client knows: idle for too long, cancelled, or reloaded.
            or (is_sequence and ("START" in message or _CANCELLED in message))
        )
        if not expected:
            self.report(f"an unexpected error: {error}")

    def load_failed(self, error: GenserveError) -> None:
        """See `Simulation.load_failed`."""
        if not self.faults["load failure"]:
            super().load_failed(error)

    def check_idle(self) -> None:
        """See `Simulation.check_idle`."""
        self.threads.sleep(1.0)  # the inferences of clients that have left may still be executed
        for served in self.repository.served:
            if served.num_pending or served.num_waiting:
                self.report(f"model {served.name} has {served.num_pending} requests that never ended")
        if self._num_used:
            self.report(f"{self._num_used} resources are not returned")

    def num_requests(self) -> int:
        """See `Simulation.num_requests`."""
        return len(self.calls)

    def open_requests(self) -> str:
        """See `Simulation.open_requests`."""
        return f"{sum(not call.num_ends for call in self.calls)} inferences never ended"
