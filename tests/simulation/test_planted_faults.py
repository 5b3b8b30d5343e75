"""The simulation reports a defect of each kind, when it is planted in the product, within some seeds."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from genserve.batching.dynamic_batcher import DynamicQueue, _BatchRules
from genserve.batching.model_instance import ModelInstance
from genserve.batching.queue_scheduler import QueueScheduler
from genserve.batching.rate_limiter import RateLimiter
from genserve.batching.sequence_slots import DirectSlots
from genserve.engine import block_files, kv_cache_manager
from genserve.engine.block_files import BlockFiles
from genserve.engine.delta_streams import AsyncDeltaStream
from genserve.engine.disk_cache import DiskCache
from genserve.engine.engine import Engine
from genserve.engine.engine_request import Request
from genserve.engine.engine_thread import EngineThread
from genserve.engine.generation_request import GenerationOutput
from genserve.engine.input_queue import InputQueue, Reservation
from genserve.engine.kv_cache_manager import KVCacheManager
from genserve.engine.scheduler import Scheduler
from genserve.engine.state_slots import NO_SLOT, StateSlots
from genserve.engine.step_processor import StepProcessor
from genserve.repository import on_demand
from genserve.repository.model_versions import ModelVersion
from genserve.repository.on_demand import OnDemandModels
from genserve.repository.unloader import Unloader
from genserve.server.http import sse_response
from tests.simulation.on_demand_simulation import OnDemandSimulation
from tests.simulation.tensor_simulation import TensorSimulation
from tests.simulation.text_simulation import TextSimulation
from tests.simulation.virtual_threads import virtual_product

# A run ends at the first violation, with its event loop open and its coroutines suspended.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
MAX_SEEDS = 300
# One fault of each kind of invariant; the others are extended tests.
ALWAYS = {
    "a leaked block",
    "a state that is still needed overwritten",
    "an end twice",
    "a missed deadline",
    "outputs mixed up",
    "instances that sleep on",
    "an inference that stays pending",
    "a torn file read",
    "a model in use unloaded",
}

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _virtual() -> Iterator[None]:
    with virtual_product():
        yield
        gc.collect()  # here, since a coroutine that is collected switches greenlets


def replaced(where: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Plant a defect: a function made from the right one takes its place."""
    return lambda monkeypatch: monkeypatch.setattr(where, name, make(getattr(where, name)))


def every(count: int) -> Callable[[], bool]:
    """Whether this is one of every `count` calls."""
    calls = itertools.count(1)
    return lambda: next(calls) % count == 0


def leaks_a_block(free_blocks):
    now = every(10)
    return lambda self, block_ids: free_blocks(self, block_ids[1:] if now() else block_ids)


def ends_twice(deliver):
    def delivers(self, outputs, *, now_s):
        deliver(self, outputs, now_s=now_s)
        for sequence, content in outputs:
            if sequence.finished:
                sequence.sink.deliver([GenerationOutput(sequence.request, sequence.choice, content)])

    return delivers


def loses_a_request(add_arrivals):
    now = every(5)

    def adds(self):
        if now():
            self._queue._arrivals.sequences[-1:] = []
        add_arrivals(self)

    return adds


def counts_a_shared_block_once(touch):
    return lambda self, block: touch(self, block) if not self._ref_counts[block] else None


def writes_after_the_end(events):
    async def writes(stream, frames):
        async for chunk in events(stream, frames):
            yield chunk
        yield frames.end()

    return writes


def starves_low_priorities(admit):
    def admits(self, output, ready, prompts, **options):
        fed = [group for group in ready if group.priority <= 0]
        return admit(self, output, fed, prompts, **options)

    return admits


def misses_deadlines(_expire):
    return lambda self, now_s, failed: []


def mixes_outputs(sample):
    def samples(self, logits, sequences):
        sample(self, logits[::-1].copy(), sequences)

    return samples


def ignores_priorities(add):
    def adds(self, group, *, arrival=None):
        add(self, group, arrival=arrival)
        self.waiting.sort(key=lambda group: group.arrival)

    return adds


def keeps_computed_tokens(preempt):
    def preempts(self):
        num_computed = self.num_computed_tokens
        preempt(self)
        self.num_computed_tokens = num_computed

    return preempts


def overwrites_states(schedule):
    def schedules(self, state, *, keep):
        if state.slot == NO_SLOT:
            return schedule(self, state, keep=keep)
        state.target = state.slot
        return None

    return schedules


def takes_over_wrong_drafts(go_back):
    del go_back
    return lambda self, request: self.states.advance(request.block_table.state, request.num_computed_tokens)


def keeps_overwritten_states(go_back):
    def goes_back(self, state):
        if state.target == state.slot:
            state.target = NO_SLOT
        else:
            go_back(self, state)

    return goes_back


def leaks_a_slot(free):
    now = every(10)
    return lambda self, state: None if now() else free(self, state)


def ignores_the_last_token(key):
    return lambda parent, token_ids: key(parent, token_ids[:-1])


def never_cancels(_close):
    return lambda self: self._choices.clear()


def never_releases(_release):
    return lambda self: None


def forgets_to_count_the_end(remove):
    now = every(3)
    return lambda self, request: None if now() else remove(self, request)


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
    "resources that stay held": replaced(
        RateLimiter, "_return_resources", lambda _: lambda self, permit: None
    ),
    "an inference that ends twice": replaced(ModelInstance, "_execute", answers_twice),
    "an inference that stays pending": replaced(
        ModelVersion, "_leave", lambda _: lambda self, inference: None
    ),
    "requests lost by a reload": replaced(Unloader, "unload", waits_for_no_request),
    "an instance that does not end": replaced(QueueScheduler, "_notify_all", lambda _: lambda self: None),
}


def forgets_what_waits(release):
    def releases(self, name):
        with self._changed:
            self._queue = type(self._queue)(load for load in self._queue if load.name != name)
        return release(self, name)

    return releases


ON_DEMAND_PLANTS: dict[str, Plant] = {
    "a model in use unloaded": replaced(
        OnDemandModels, "_is_free", lambda _: lambda self, resident, *, leaving: True
    ),
    "more models than fit": replaced(OnDemandModels, "_fits", lambda _: lambda self, residents, sizes: True),
    "a failed load that nobody hears of": replaced(on_demand, "_fail", lambda _: lambda load, error: None),
    "an unload that loses what waits": replaced(OnDemandModels, "release", forgets_what_waits),
}


def ignores_the_fingerprint(init):
    def begins(self, folder, *, fingerprint, **options):
        init(self, folder, fingerprint="0" * 32, **options)

    return begins


def leaves_copies_to_a_full_disk(_run):
    def runs(self, files, folder, max_bytes):
        with suppress(OSError):
            self._write_all(files, folder, max_bytes)

    return runs


PLANTS: dict[str, Plant] = {
    "a torn file read": replaced(block_files, "_checksums", lambda _: lambda rows: [0] * len(rows)),
    "blocks of other weights": replaced(BlockFiles, "__init__", ignores_the_fingerprint),
    "copies that a full disk leaves": replaced(DiskCache, "_run", leaves_copies_to_a_full_disk),
    "a leaked block": replaced(KVCacheManager, "_free_blocks", leaks_a_block),
    "a wrong reference count": replaced(KVCacheManager, "_touch", counts_a_shared_block_once),
    "blocks shared by different tokens": replaced(kv_cache_manager, "block_key", ignores_the_last_token),
    "a state that is still needed overwritten": replaced(StateSlots, "schedule", overwrites_states),
    "a state after a wrong draft": replaced(KVCacheManager, "go_back", takes_over_wrong_drafts),
    "a state of a failed forward": replaced(StateSlots, "go_back", keeps_overwritten_states),
    "a snapshot that outlives its block": replaced(StateSlots, "drop", lambda _: lambda self, block: None),
    "a leaked state slot": replaced(StateSlots, "free", leaks_a_slot),
    "a preempted request without blocks": replaced(Request, "preempt", keeps_computed_tokens),
    "an end twice": replaced(EngineThread, "_deliver", ends_twice),
    "a lost request": replaced(EngineThread, "_add_arrivals", loses_a_request),
    "an event after the end": replaced(sse_response, "_events", writes_after_the_end),
    "starvation": replaced(Scheduler, "_admit", starves_low_priorities),
    "priorities ignored": replaced(Scheduler, "add", ignores_priorities),
    "a missed deadline": replaced(Engine, "_expire", misses_deadlines),
    "outputs mixed up": replaced(StepProcessor, "_sample", mixes_outputs),
    "streams that are not cancelled": replaced(AsyncDeltaStream, "close", never_cancels),
    "slots that are not released": replaced(Reservation, "release", never_releases),
    "ends that are not counted": replaced(InputQueue, "remove", forgets_to_count_the_end),
    "arrivals that wake nobody": replaced(InputQueue, "_notify_arrival", does_not_wake),
}


def plants(named: dict[str, Plant]) -> list:
    return [
        pytest.param(plant, id=name, marks=[] if name in ALWAYS else pytest.mark.extended)
        for name, plant in named.items()
    ]


@pytest.mark.parametrize("plant", plants(PLANTS))
def test_a_planted_fault_of_generation_is_reported(plant, monkeypatch):
    plant(monkeypatch)
    assert any(TextSimulation(seed).run().problems for seed in range(MAX_SEEDS))


@pytest.mark.parametrize("plant", plants(TENSOR_PLANTS))
def test_a_planted_fault_of_other_models_is_reported(plant, monkeypatch):
    plant(monkeypatch)
    assert any(TensorSimulation(seed).run().problems for seed in range(MAX_SEEDS))


@pytest.mark.parametrize("plant", plants(ON_DEMAND_PLANTS))
def test_a_planted_fault_of_models_on_demand_is_reported(plant, monkeypatch):
    plant(monkeypatch)
    assert any(OnDemandSimulation(seed).run().problems for seed in range(MAX_SEEDS))
