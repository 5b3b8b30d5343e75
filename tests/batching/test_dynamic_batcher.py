from __future__ import annotations

import random

import pytest

from genserve.batching.dynamic_batcher import DynamicQueue, batch_key
from genserve.config.model_config import DynamicBatching, ModelConfig, QueuePolicy, TensorSpec
from genserve.errors import InferenceError, Status
from genserve.inference import InferenceResponse
from tests.batching.queue_driver import MS, QueueDriver, SentRequest, asked


def driver(*, max_batch_size=8, inputs=None, **batching) -> QueueDriver:
    config = ModelConfig(
        name="m",
        max_batch_size=max_batch_size,
        inputs=inputs or (TensorSpec(name="X", data_type="TYPE_FP32", dims=(-1,)),),
    )
    return QueueDriver(
        DynamicQueue(DynamicBatching(**batching), max_batch_size=max_batch_size, batch_key=batch_key(config))
    )


def sizes(driver: QueueDriver) -> list[int]:
    """The batches that run one after the other, until nothing may."""
    return [len(batch) for batch in iter(driver.take, [])]


def test_waiting_requests_form_a_batch():
    queue = driver()
    some = asked(3)
    queue.add(*some)
    assert queue.take() == some
    assert queue.take() == []


def test_a_request_with_another_key_ends_the_batch_and_is_not_skipped():
    queue = driver()
    a1, a2, b, a3 = SentRequest(), SentRequest(), SentRequest(shape=(5,)), SentRequest()
    queue.add(a1, a2, b, a3)
    assert [queue.take(), queue.take(), queue.take()] == [[a1, a2], [b], [a3]]


def test_the_batch_dimension_may_differ():
    queue = driver()
    some = [SentRequest(rows=1), SentRequest(rows=3)]
    queue.add(*some)
    assert queue.take() == some


def test_ragged_inputs_of_any_shape_run_together():
    queue = driver(inputs=(TensorSpec(name="X", data_type="TYPE_FP32", dims=(-1,), allow_ragged_batch=True),))
    queue.add(SentRequest(shape=(4,)), SentRequest(shape=(5,)))
    assert sizes(queue) == [2]


def test_requests_with_different_optional_inputs_do_not_share_a_batch():
    specs = tuple(
        TensorSpec(name=name, data_type="TYPE_FP32", dims=(4,), optional=name == "Y") for name in "XY"
    )
    queue = driver(inputs=specs)
    queue.add(SentRequest(), SentRequest(inputs="XY"), SentRequest(inputs="XY"), SentRequest())
    assert sizes(queue) == [1, 2, 1]


def test_rows_are_counted_up_to_the_largest_batch():
    queue = driver(max_batch_size=4)
    queue.add(*asked(2, rows=2), *asked(1, rows=3), *asked(2, rows=1))
    assert sizes(queue) == [2, 2, 1]


def test_a_model_that_does_not_batch_runs_each_request_alone():
    queue = driver(max_batch_size=0, max_queue_delay_us=1000)
    queue.add(*asked(2))
    assert sizes(queue) == [1, 1]


def test_a_preferred_size_runs_before_the_rest():
    queue = driver(preferred_batch_sizes=(4,))
    queue.add(*asked(6))
    assert sizes(queue) == [4, 2]


def test_a_batch_waits_for_the_delay_of_its_oldest_request():
    queue = driver(max_queue_delay_us=5000)
    queue.add(*asked(1))
    queue.pass_time(2)
    queue.add(*asked(1))
    assert queue.plan() == ((), queue.now_ns + 3 * MS)
    queue.pass_time(2.999)
    assert queue.take() == []
    queue.pass_time(0.001)
    assert sizes(queue) == [2]


def test_a_full_batch_does_not_wait_for_the_delay():
    queue = driver(max_queue_delay_us=5000, max_batch_size=3)
    queue.add(*asked(4))
    assert sizes(queue) == [3]


def test_a_preferred_size_does_not_wait_for_the_delay_and_the_rest_does():
    queue = driver(max_queue_delay_us=5000, preferred_batch_sizes=(2, 4))
    queue.add(*asked(3))
    assert sizes(queue) == [2]
    queue.pass_time(5)
    assert sizes(queue) == [1]


def test_a_request_larger_than_any_preferred_size_runs_alone_immediately():
    queue = driver(max_queue_delay_us=5000, preferred_batch_sizes=(2,))
    queue.add(*asked(2, rows=3))
    assert sizes(queue) == [1, 1]


def test_a_request_of_another_shape_completes_the_batch():
    queue = driver(max_queue_delay_us=5000)
    queue.add(SentRequest(), SentRequest(shape=(5,)))
    assert sizes(queue) == [1]


def test_after_the_delay_all_requests_run_not_only_a_preferred_size():
    queue = driver(max_queue_delay_us=5000, preferred_batch_sizes=(4,))
    queue.add(*asked(3))
    assert sizes(queue) == []
    queue.pass_time(5)
    queue.add(*asked(2))
    assert sizes(queue) == [5]


def test_a_full_queue_rejects_in_tritons_words():
    queue = driver(default_queue_policy=QueuePolicy(max_queue_size=2))
    queue.add(*asked(2))
    with pytest.raises(InferenceError, match=r"^\[request id: r7\] Exceeds maximum queue size") as raised:
        queue.add(SentRequest(request_id="r7"))
    assert raised.value.status is Status.UNAVAILABLE
    with pytest.raises(InferenceError, match=r"^\[request id: <id_unknown>\] "):
        queue.add(SentRequest())
    queue.take()
    queue.add(SentRequest())


def test_a_late_request_is_rejected_at_its_timeout():
    queue = driver(default_queue_policy=QueuePolicy(default_timeout_us=2000))
    late, later = asked(2)
    queue.add(late)
    queue.pass_time(1)
    queue.add(later)
    assert queue.queue.expires_ns == queue.now_ns + MS
    assert queue.pass_time(1) == [late]
    assert late.error == "Request timeout expired"
    assert late.inference.error.status is Status.UNAVAILABLE
    assert queue.take() == [later]
    assert queue.queue.expires_ns is None


def test_a_late_request_of_a_delaying_level_runs_after_the_others():
    queue = driver(max_batch_size=1, default_queue_policy=QueuePolicy(default_timeout_us=2000, delays=True))
    late, in_time = asked(2)
    queue.add(late)
    assert queue.pass_time(2) == []
    queue.add(in_time)
    assert [queue.take(), queue.take()] == [[in_time], [late]]


@pytest.mark.parametrize(
    ("default_us", "allowed", "own_us", "expires_ms"),
    [(2000, True, 1000, 1), (2000, True, 3000, 2), (2000, False, 1000, 2), (0, True, 1000, None)],
)
def test_a_request_can_only_shorten_its_timeout_where_it_is_allowed(default_us, allowed, own_us, expires_ms):
    policy = QueuePolicy(default_timeout_us=default_us, allow_timeout_override=allowed)
    queue = driver(default_queue_policy=policy)
    queue.add(SentRequest(timeout_us=own_us))
    assert queue.queue.expires_ns == (None if expires_ms is None else queue.now_ns + expires_ms * MS)


def test_higher_levels_run_first_and_unknown_ones_are_the_default():
    queue = driver(max_batch_size=1, priority_levels=3, default_priority_level=2)
    low, default, unknown, high = (SentRequest(priority=priority) for priority in (3, 0, 9, 1))
    queue.add(low, default, unknown, high)
    assert [queue.take()[0] for _ in range(4)] == [high, default, unknown, low]


def test_there_may_be_as_many_levels_as_numbers():
    queue = driver(max_batch_size=1, priority_levels=2**64 - 1, default_priority_level=2**64 - 1)
    default, low, high = (SentRequest(priority=priority) for priority in (0, 2**64 - 2, 7))
    queue.add(default, low, high)
    assert [queue.take()[0] for _ in range(3)] == [high, low, default]


def test_priorities_are_ignored_without_levels():
    queue = driver(max_batch_size=1)
    some = [SentRequest(priority=priority) for priority in (3, 1, 2)]
    queue.add(*some)
    assert [queue.take()[0] for _ in range(3)] == some


def test_each_level_has_its_own_policy():
    queue = driver(
        priority_levels=2,
        default_priority_level=2,
        default_queue_policy=QueuePolicy(max_queue_size=1),
        priority_queue_policy={1: QueuePolicy(max_queue_size=2)},
    )
    queue.add(*asked(2, priority=1), *asked(1, priority=2))
    for priority in (1, 2):
        with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
            queue.add(SentRequest(priority=priority))


def test_a_cancelled_request_leaves_the_queue():
    queue = driver()
    first, second = asked(2)
    queue.add(first, second)
    assert queue.cancel(first) == [first]
    assert first.inference.error.status is Status.CANCELLED
    assert queue.take() == [second]
    assert queue.cancel(second) == []


def test_responses_leave_in_the_order_of_their_requests():
    queue = driver(max_batch_size=1, preserve_ordering=True)
    some = asked(3)
    queue.add(*some)
    for one in some:
        assert queue.take() == [one]
    some[2].inference.send(InferenceResponse(), final=True)
    some[1].inference.send(InferenceResponse(), final=False)
    assert [one.responses for one in some] == [[], [], []]
    some[0].inference.send(InferenceResponse(), final=True)
    assert [len(one.responses) for one in some] == [1, 1, 0]
    some[1].inference.send(None, final=True)
    assert [len(one.responses) for one in some] == [1, 2, 1]


def test_responses_that_wait_for_earlier_requests_outlast_a_further_execution():
    queue = driver(max_batch_size=1, preserve_ordering=True)
    first, iterative = asked(2)
    queue.add(first, iterative)
    assert [queue.take(), queue.take()] == [[first], [iterative]]
    iterative.inference.send(InferenceResponse(), final=False)
    queue.add(iterative)
    assert queue.take() == [iterative]
    iterative.inference.send(InferenceResponse(), final=True)
    assert iterative.responses == []
    first.inference.send(InferenceResponse(), final=True)
    assert len(iterative.responses) == 2


@pytest.mark.parametrize("seed", range(40))
def test_under_random_arrivals_nothing_is_lost_or_run_twice_and_the_rules_hold(seed):
    choose = random.Random(seed)
    max_batch_size = choose.choice([1, 4, 8])
    policy = QueuePolicy(
        default_timeout_us=choose.choice([0, 3000]),
        delays=choose.random() < 0.3,
        max_queue_size=choose.choice([0, 6]),
    )
    queue = driver(
        max_batch_size=max_batch_size,
        preferred_batch_sizes=tuple(choose.sample(range(1, max_batch_size + 1), k=1))
        if choose.random() < 0.5
        else (),
        max_queue_delay_us=choose.choice([0, 2000]),
        priority_levels=choose.choice([0, 2]),
        default_priority_level=2,
        default_queue_policy=policy,
    )
    ended: list[SentRequest] = []
    for _ in range(300):
        match choose.randrange(4):
            case 0:
                one = SentRequest(
                    rows=choose.randint(1, max_batch_size),
                    shape=(choose.choice([4, 4, 5]),),
                    priority=choose.randint(0, 2),
                )
                try:
                    queue.add(one)
                except InferenceError:
                    assert policy.max_queue_size
            case 1:
                ended += queue.pass_time(choose.choice([0.5, 1, 4]))
            case 2:
                batch = queue.take()
                _check(batch, max_batch_size, in_order=not policy.delays, driver=queue)
                ended += batch
            case 3 if queue.asked and choose.random() < 0.3:
                ended += queue.cancel(choose.choice(queue.asked))
        assert len(queue.queue) == len(queue.asked) - len(ended)
    while len(queue.queue):
        ended += queue.pass_time(10)
        ended += queue.take()
    assert sorted(map(id, ended)) == sorted(map(id, queue.asked))


def _check(batch, max_batch_size, *, in_order, driver):
    assert sum(one.inference.batch_size for one in batch) <= max_batch_size
    assert len({one.inference.inputs["X"].shape[1:] for one in batch}) <= 1
    for priority in range(3):
        places = [driver.asked.index(one) for one in batch if one.inference.request.priority == priority]
        assert not in_order or places == sorted(places)
        waiting = [
            driver.asked.index(driver.asked_of(i))
            for i in driver.queue._level_of
            if i.request.priority == priority
        ]
        assert not in_order or not places or not waiting or max(places) < min(waiting)
