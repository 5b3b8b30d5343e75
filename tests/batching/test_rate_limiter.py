from __future__ import annotations

import threading
from collections import Counter

import pytest

from genserve.backends.backend import Placement
from genserve.batching.model_instance import ModelInstance
from genserve.batching.queue_scheduler import QueueScheduler
from genserve.batching.rate_limiter import RateLimiter, ResourceCapacity
from genserve.batching.request_queue import DirectQueue
from genserve.config.model_config import Resource, ResourceClaim
from genserve.errors import InferenceError, RepositoryError
from genserve.inference import Executor, InferenceResponse
from genserve.inference_statistics import ModelStatistics
from tests.batching.queue_driver import SentRequest


def claim(priority=1, **counts) -> ResourceClaim:
    """Ask for resources; those in capitals are global."""
    resources = tuple(
        Resource(name=name, count=count, is_global=name.isupper()) for name, count in counts.items()
    )
    return ResourceClaim(resources=resources, priority=priority)


def asks(permit) -> bool:
    """Whether a permit is granted immediately."""
    permit.ask()
    return permit.granted.acquire(blocking=False)


def test_without_capacities_the_largest_need_is_available():
    limiter = RateLimiter()
    small, large = (limiter.register(claim(r=count), device_id=0) for count in (2, 4))
    other = limiter.register(claim(r=2), device_id=0)
    assert [asks(small), asks(other), asks(large)] == [True, True, False]
    small.release()
    assert not large.granted.acquire(blocking=False)
    other.release()
    assert large.granted.acquire(blocking=False)


def test_a_resource_is_on_each_device_unless_it_is_global():
    limiter = RateLimiter()
    assert all(asks(limiter.register(claim(r=1), device_id=device)) for device in (0, 1))
    permits = [limiter.register(claim(R=1), device_id=device) for device in (0, 1)]
    assert [asks(permit) for permit in permits] == [True, False]


def test_no_permit_overtakes_the_first_in_line():
    limiter = RateLimiter()
    small, large, other = (limiter.register(claim(r=count), device_id=0) for count in (1, 3, 1))
    assert [asks(small), asks(large), asks(other)] == [True, False, False]
    small.release()
    assert large.granted.acquire(blocking=False)
    assert not other.granted.acquire(blocking=False)


def run(permits, *, num_turns) -> Counter[int]:
    """Let instances that always have work share one resource; return who had how many turns."""
    turns: Counter[int] = Counter()
    for permit in permits:
        permit.ask()
    for _ in range(num_turns):
        (number,) = (n for n, permit in enumerate(permits) if permit.granted.acquire(blocking=False))
        turns[number] += 1
        permits[number].executed()
        permits[number].ask()
    return turns


@pytest.mark.parametrize(
    ("priorities", "turns"),
    [((1, 1), (60, 60)), ((1, 2), (80, 40)), ((0, 1), (60, 60)), ((1, 3), (90, 30))],
)
def test_priority_2_gets_half_as_many_turns_as_1(priorities, turns):
    limiter = RateLimiter()
    permits = [limiter.register(claim(priority, r=1), device_id=0) for priority in priorities]
    had = run(permits, num_turns=120)
    assert [had[number] for number in range(len(permits))] == pytest.approx(turns, abs=1)


def test_an_idle_permit_does_not_accumulate_turns():
    limiter = RateLimiter()
    old = limiter.register(claim(r=1), device_id=0)
    for _ in range(100):
        old.acquire()
        old.executed()
    old.release()
    new = limiter.register(claim(r=1), device_id=0)
    turns = run([old, new], num_turns=20)
    assert turns[0] == pytest.approx(10, abs=1)


@pytest.mark.parametrize(
    ("capacities", "needs", "device_id", "available"),
    [
        ([ResourceCapacity(name="r", count=3)], claim(r=4), 0, 3),
        ([ResourceCapacity(name="other", count=3)], claim(r=1), 0, 0),
        ([ResourceCapacity(name="r", count=9, device_id=1)], claim(r=4), 0, 0),
        ([ResourceCapacity(name="R", count=3, device_id=1)], claim(R=4), 0, 3),
    ],
)
def test_a_capacity_smaller_than_a_need_fails_the_load(
    capacities, needs, device_id, available
):
    limiter = RateLimiter(capacities)
    (resource,) = needs.resources
    with pytest.raises(RepositoryError) as failure:
        limiter.register(needs, device_id=device_id)
    assert failure.value.message == (
        f'Resource count for "{resource.name}" is limited to {available} which will prevent scheduling of '
        f"one or more model instances, the minimum required count is {resource.count}"
    )
    limiter.register(claim(), device_id=0)


@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        ("r:3", ResourceCapacity(name="r", count=3)),
        ("r:3:1", ResourceCapacity(name="r", count=3, device_id=1)),
    ],
)
def test_a_capacity_is_read_as_triton_writes_it(text, capacity):
    assert ResourceCapacity.parse(text) == capacity


@pytest.mark.parametrize("text", ["r", "r:3:0:9", ":3", "r:x", "r:3:x", "r:-1", ""])
def test_a_malformed_capacity_is_rejected(text):
    with pytest.raises(ValueError, match=r"option format is|Invalid option value"):
        ResourceCapacity.parse(text)


def test_a_larger_capacity_lets_several_instances_run():
    limiter = RateLimiter(
        [ResourceCapacity(name="r", count=4), ResourceCapacity(name="r", count=6, device_id=1)]
    )
    assert [asks(limiter.register(claim(r=2), device_id=0)) for _ in range(3)] == [True, True, False]
    assert [asks(limiter.register(claim(r=2), device_id=1)) for _ in range(4)] == [True, True, True, False]


def test_a_resource_cannot_be_both_global_and_device_specific():
    limiter = RateLimiter()
    limiter.register(claim(r=1), device_id=0)
    with pytest.raises(RepositoryError, match='Resource "r" is present as both global and device-specific'):
        limiter.register(
            ResourceClaim(resources=(Resource(name="r", count=1, is_global=True),), priority=1), device_id=0
        )


def test_the_need_of_a_withdrawn_instance_is_forgotten():
    limiter = RateLimiter()
    large = limiter.register(claim(r=4), device_id=0)
    small = [limiter.register(claim(r=2), device_id=0) for _ in range(2)]
    limiter.withdraw(large)
    assert [asks(permit) for permit in small] == [True, False]


def test_an_instance_holds_its_permit_from_the_take_until_it_is_done():
    limiter = RateLimiter()
    permits = [limiter.register(claim(r=1), device_id=0) for _ in range(2)]
    scheduler = QueueScheduler(DirectQueue(), num_instances=2, permits=permits)
    first, second = SentRequest(), SentRequest()
    scheduler.submit(first.inference)
    scheduler.submit(second.inference)
    batch = scheduler.take(0)
    assert batch == (first.inference,)
    permits[1].ask()
    assert not permits[1].granted.acquire(blocking=False)
    scheduler.done(0, batch)
    scheduler.abandon(0, InferenceError("it is gone"))
    assert permits[1].granted.acquire(blocking=False)
    permits[1].release()
    assert scheduler.take(1) == (second.inference,)


def test_an_instance_without_work_releases_its_permit():
    limiter = RateLimiter()
    holder, permit = (limiter.register(claim(r=1), device_id=0) for _ in range(2))

    class CancelledMeanwhile:
        """A permit that is granted when nothing is left to do."""

        def acquire(self):
            permit.acquire()
            one.inference.cancel()
            scheduler.close()

        def release(self):
            permit.release()

    scheduler = QueueScheduler(DirectQueue(), num_instances=1, permits=[CancelledMeanwhile()])
    one = SentRequest()
    scheduler.submit(one.inference)
    assert scheduler.take(0) is None
    assert asks(holder)


def test_busy_instances_of_two_models_take_turns_by_priority():
    class Noting:
        """Records whose turn it is."""

        def __init__(self, name):
            self.name = name

        def execute(self, batch):
            turns.append(self.name)
            for inference in batch:
                inference.send(InferenceResponse(), final=True)
                ended.release()

        def close(self):
            pass

    ended = threading.Semaphore(0)
    turns: list[str] = []
    limiter = RateLimiter()
    blocker = limiter.register(claim(r=1), device_id=0)
    blocker.acquire()
    running, schedulers = [], []
    for name, priority in (("often", 1), ("seldom", 2)):
        permit = limiter.register(claim(priority, r=1), device_id=0)
        scheduler = QueueScheduler(DirectQueue(), num_instances=1, permits=[permit])
        for _ in range(90):
            scheduler.submit(SentRequest().inference)
        schedulers.append(scheduler)
        instance = ModelInstance(
            lambda name=name: Noting(name),
            number=0,
            placement=Placement(name=name, kind="CPU"),
            scheduler=scheduler,
            statistics=ModelStatistics(),
        )
        instance.started.result()
        running.append(instance)
    while len(limiter._waiting) < 2:
        pass  # both instances have found work
    blocker.release()
    for _ in range(180):
        assert ended.acquire(timeout=30)
    for scheduler in schedulers:
        scheduler.close()
    for instance in running:
        instance.join()
    assert Counter(turns[:90])["often"] == pytest.approx(60, abs=2)
    assert Counter(turns) == {"often": 90, "seldom": 90}


def test_blocked_by_returns_the_instances_that_hold_its_resources():
    limiter = RateLimiter([ResourceCapacity(name="r", count=2), ResourceCapacity(name="s", count=1)])
    holder, first, second, other = (
        limiter.register(claim(**needs), device_id=0)
        for needs in ({"r": 1}, {"r": 2, "s": 1}, {"s": 1}, {"t": 0})
    )
    permits = {"holder": holder, "first": first, "second": second, "other": other}
    for name, permit in permits.items():
        permit.executor = Executor(name=name)
    assert second.blocked_by() == []
    assert [asks(holder), asks(first), asks(second)] == [True, False, False]
    blocked_by = {name: permit.blocked_by() for name, permit in permits.items()}
    names = {name: [executor.name for executor in blockers] for name, blockers in blocked_by.items()}
    assert names == {"holder": [], "first": ["holder"], "second": ["first"], "other": []}
