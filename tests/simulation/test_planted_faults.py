"""The simulation reports a defect of each kind, when it is planted in the product, within some seeds."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from genserve.generation import kv_cache_manager
from genserve.generation.delta_streams import AsyncDeltaStream
from genserve.generation.engine import Engine
from genserve.generation.engine_request import Request
from genserve.generation.engine_thread import EngineThread
from genserve.generation.kv_cache_manager import KVCacheManager
from genserve.generation.output_processor import OutputProcessor
from genserve.generation.request_inbox import RequestInbox, Reservation
from genserve.generation.scheduler import Scheduler
from genserve.repository.model_lifecycle import _Unloader
from genserve.repository.model_versions import ModelVersion
from genserve.schedulers.dynamic_batcher import DynamicQueue, _BatchRules
from genserve.schedulers.model_instance import ModelInstance
from genserve.schedulers.queue_scheduler import QueueScheduler
from genserve.schedulers.rate_limiter import RateLimiter
from genserve.schedulers.sequence_slots import DirectSlots
from genserve.server import sse_response
from tests.simulation.tensor_simulation import TensorSimulation
from tests.simulation.text_simulation import TextSimulation
from tests.simulation.virtual_threads import virtual_product

# A run ends at the first violation, with its event loop open and its coroutines suspended.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
MAX_SEEDS = 300

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _virtual() -> Iterator[None]:
    with virtual_product():
        yield
        gc.collect()    # here, since a coroutine that is collected switches greenlets


def replaced(where: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Plant a defect: a function made from the right one takes its place."""
    return lambda monkeypatch: monkeypatch.setattr(where, name, make(getattr(where, name)))


def every(count: int) -> Callable[[], bool]:
    """Whether this is one of every `count` calls."""
    calls = itertools.count(1)
    return lambda: next(calls) % count == 0


def leaks_a_block(release):
    now = every(10)
    return lambda self, block_ids: release(self, block_ids[1:] if now() else block_ids)


def ends_twice(deliver):
    def delivers(self, outputs, *, now_s):
        sinks = {id(sequence): self._open.sequences[sequence].sink for sequence, _ in outputs}
        deliver(self, outputs, now_s=now_s)
        for sequence, content in outputs:
            if sequence.finished:
                sinks[id(sequence)].deliver([(sequence, content)])

    return delivers


def loses_a_request(add_arrivals):
    now = every(5)

    def adds(self):
        if now():
            self._arrivals.sequences[-1:] = []
        add_arrivals(self)

    return adds


def counts_a_shared_block_once(hold):
    return lambda self, block: hold(self, block) if not self._ref_counts[block] else None


def writes_after_the_end(events):
    async def writes(stream, frames):
        async for chunk in events(stream, frames):
            yield chunk
        yield frames.end()

    return writes


def starves_low_priorities(admit):
    def admits(self, output, prompts, **options):
        starved = [lead for lead in self._waiting if lead.priority > 0]
        self._waiting = [lead for lead in self._waiting if lead not in starved]
        try:
            return admit(self, output, prompts, **options)
        finally:
            self._waiting += starved

    return admits


def misses_deadlines(_expire):
    return lambda self, now_s, failed: []


def mixes_outputs(sample):
    def samples(self, logits, sequences):
        sample(self, logits[::-1].copy(), sequences)

    return samples


def ignores_priorities(add):
    def adds(self, lead, *, arrival=None):
        add(self, lead, arrival=arrival)
        self._waiting.sort(key=lambda lead: self._ranks[lead][1])

    return adds


def keeps_computed_tokens(preempt):
    def preempts(self):
        num_computed = self.num_computed_tokens
        preempt(self)
        self.num_computed_tokens = num_computed

    return preempts


def ignores_the_last_token(key):
    return lambda parent, token_ids: key(parent, token_ids[:-1])


def never_cancels(_close):
    return lambda self: self._choices.clear()


def never_releases(_release):
    return lambda self: None


def forgets_to_count_the_end(_leave):
    now = every(3)
    return lambda self, request, *, num_seqs: None if now() else _leave(self, request, num_seqs=num_seqs)


def does_not_wake(_notify):
    now = every(3)
    return lambda self: None if now() else _notify(self)


def wakes_no_instance(pop_sleeper):
    now = every(4)
    return lambda self, instance: None if now() else pop_sleeper(self, instance)


def reverses_slots(start):
    return lambda self, batch, sequences: start(self, batch, sequences)[::-1]


def allows_one_row_more(_rules):
    def makes(*, max_batch_size, **options):
        return _rules(max_batch_size=max_batch_size + 1, **options)

    return makes


def answers_twice(execute):
    def executes(self, backend, batch):
        requesters = [(inference.on_response, inference) for inference in batch]
        execute(self, backend, batch)
        for on_response, inference in requesters:
            if inference.ended:
                on_response(None, True)

    return executes


def waits_for_no_request(unload):
    return lambda self, old, *, timeout_s: unload(self, old, timeout_s=0.0)


TENSOR_PLANTS: dict[str, Plant] = {
    "instances that sleep on": replaced(QueueScheduler, "_pop_sleeper", wakes_no_instance),
    "requests that never expire": replaced(DynamicQueue, "expire", lambda _: lambda self, *, now_ns: []),
    "a batch of too many rows": replaced(_BatchRules, "of", allows_one_row_more),
    "sequences in the wrong slots": replaced(DirectSlots, "start", reverses_slots),
    "resources without a limit": replaced(RateLimiter, "_is_free", lambda _: lambda self, needs: True),
    "resources that stay held": replaced(RateLimiter, "_take_back", lambda _: lambda self, permit: None),
    "an inference that ends twice": replaced(ModelInstance, "_execute", answers_twice),
    "an inference that stays pending": replaced(
        ModelVersion, "_leave", lambda _: lambda self, inference: None
    ),
    "requests lost by a reload": replaced(_Unloader, "unload", waits_for_no_request),
    "an instance that does not end": replaced(QueueScheduler, "_notify_all", lambda _: lambda self: None),
}

PLANTS: dict[str, Plant] = {
    "a leaked block": replaced(KVCacheManager, "_release", leaks_a_block),
    "a wrong reference count": replaced(KVCacheManager, "_hold", counts_a_shared_block_once),
    "blocks shared by different tokens": replaced(kv_cache_manager, "block_key", ignores_the_last_token),
    "a preempted request without blocks": replaced(Request, "preempt", keeps_computed_tokens),
    "an end twice": replaced(EngineThread, "_deliver", ends_twice),
    "a lost request": replaced(EngineThread, "_add_arrivals", loses_a_request),
    "an event after the end": replaced(sse_response, "_events", writes_after_the_end),
    "starvation": replaced(Scheduler, "_admit", starves_low_priorities),
    "priorities ignored": replaced(Scheduler, "add", ignores_priorities),
    "a missed deadline": replaced(Engine, "_expire", misses_deadlines),
    "outputs mixed up": replaced(OutputProcessor, "_sample", mixes_outputs),
    "streams that are not cancelled": replaced(AsyncDeltaStream, "close", never_cancels),
    "places that are not released": replaced(Reservation, "release", never_releases),
    "ends that are not counted": replaced(RequestInbox, "_leave", forgets_to_count_the_end),
    "arrivals that wake nobody": replaced(RequestInbox, "_notify_arrival", does_not_wake),
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_a_planted_fault_of_generation_is_reported(plant, monkeypatch):
    plant(monkeypatch)
    assert any(TextSimulation(seed).run().problems for seed in range(MAX_SEEDS))


@pytest.mark.parametrize("plant", TENSOR_PLANTS.values(), ids=TENSOR_PLANTS.keys())
def test_a_planted_fault_of_other_models_is_reported(plant, monkeypatch):
    plant(monkeypatch)
    assert any(TensorSimulation(seed).run().problems for seed in range(MAX_SEEDS))
