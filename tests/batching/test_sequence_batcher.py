from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest

from genserve.batching.sequence_batcher import SequenceQueue
from genserve.config.model_config import (
    Control,
    DirectStrategy,
    InitialState,
    ModelConfig,
    OldestStrategy,
    SequenceBatching,
    StateSpec,
    TensorSpec,
)
from genserve.errors import InferenceError, RepositoryError, Status
from genserve.inference import RequestFlags
from genserve.tensor import DataType, Tensor
from tests.batching.queue_driver import END, START, QueueDriver, SentRequest

NO_START = "must specify the START flag on the first request of the sequence"
CONTROLS = (
    Control(name="START", kind="CONTROL_SEQUENCE_START", data_type="TYPE_INT32", false_true=(0, 1)),
    Control(name="END", kind="CONTROL_SEQUENCE_END", data_type="TYPE_FP32", false_true=(-1, 1)),
    Control(name="READY", kind="CONTROL_SEQUENCE_READY", data_type="TYPE_BOOL", false_true=(0, 1)),
    Control(name="CORRID", kind="CONTROL_SEQUENCE_CORRID", data_type="TYPE_UINT64"),
)


def driver(strategy=None, *, max_batch_size=4, num_instances=1, path=None, **sequences) -> QueueDriver:
    config = ModelConfig(
        name="m",
        max_batch_size=max_batch_size,
        inputs=(TensorSpec(name="X", data_type="TYPE_FP32", dims=(-1,)),),
        sequence_batching=SequenceBatching(strategy=strategy or DirectStrategy(), **sequences),
    )
    return QueueDriver(SequenceQueue(config, num_instances=num_instances, path=path))


def of(correlation_id, flags=RequestFlags.NONE, **kwargs) -> SentRequest:
    return SentRequest(correlation_id=correlation_id, flags=flags, **kwargs)


STRATEGIES = pytest.mark.parametrize(
    "strategy", [DirectStrategy(), OldestStrategy()], ids=["direct", "oldest"]
)


@STRATEGIES
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (of(0, START), "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        (of("", START), "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        (
            of(5),
            f"inference request for sequence 5 to model 'm' {NO_START}",
        ),
        (
            of("five", END),
            f"inference request for sequence five to model 'm' {NO_START}",
        ),
        (
            of(5, START, rows=2),
            "inference request to model 'm' must specify batch-size 1 due to requirements of sequence "
            "batcher",
        ),
    ],
)
def test_a_request_that_violates_the_rules_is_rejected_in_tritons_words(strategy, wrong, message):
    with pytest.raises(InferenceError) as raised:
        driver(strategy).add(wrong)
    assert raised.value.message == message
    assert raised.value.status is Status.INVALID_ARG


@STRATEGIES
def test_requests_of_a_sequence_run_one_after_the_other(strategy):
    queue = driver(strategy)
    a1, a2, b1 = of(1, START), of(1, END), of("b", START)
    queue.add(a1, a2, b1)
    first = queue.take()
    assert first == [a1, b1]
    assert queue.take() == []
    queue.finish(first)
    assert queue.run() == [a2]


@STRATEGIES
def test_a_sequence_without_a_slot_waits_for_the_end_of_another(strategy):
    queue = driver(strategy, max_batch_size=1)
    a1, a2, b1, b2, c1 = of(1, START), of(1, END), of(2, START), of(2, END), of(3, START)
    queue.add(a1, b1, c1, b2)
    assert [queue.run(), queue.run()] == [[a1], []]
    queue.add(a2)
    assert [queue.run() for _ in range(4)] == [[a2], [b1], [b2], [c1]]


def test_sequences_are_spread_over_the_instances():
    queue = driver(num_instances=2)
    a, b, c = (of(name, START) for name in "abc")
    queue.add(a, b, c)
    assert [queue.take(0), queue.take(1)] == [[a, c], [b]]


def test_the_oldest_strategy_takes_as_many_sequences_as_are_candidates():
    queue = driver(OldestStrategy(max_candidate_sequences=2))
    queue.add(*(of(name, START) for name in "abc"))
    assert len(queue.run()) == 2
    assert queue.run() == []


def test_the_oldest_strategy_batches_like_the_dynamic_batcher():
    queue = driver(
        OldestStrategy(max_candidate_sequences=8, preferred_batch_sizes=(2,), max_queue_delay_us=3000)
    )
    a, b, c = (of(name, START) for name in "abc")
    queue.add(a)
    assert queue.run() == []
    queue.add(b, c)
    assert queue.run() == [a, b]
    queue.pass_time(3)
    assert queue.run() == [c]


def test_a_start_without_an_end_continues_in_the_same_slot():
    queue = driver(max_batch_size=1)
    first, again = of(1, START), of(1, START | END)
    queue.add(first, again)
    assert [queue.run(), queue.run()] == [[first], [again]]


def test_after_its_end_the_same_id_is_a_new_sequence():
    queue = driver()
    queue.add(of(1, START | END), of(1, START))
    assert len(queue.run()) == 2
    with pytest.raises(InferenceError, match="must specify the START flag"):
        driver().add(of(1))


def control_values(inference) -> tuple:
    return tuple(inference.inputs[name].array.item() for name in ("START", "END", "READY", "CORRID"))


@pytest.mark.parametrize(("max_batch_size", "shape"), [(4, (1, 1)), (0, (1,))])
def test_the_model_gets_the_controls_of_the_sequence(max_batch_size, shape):
    queue = driver(max_batch_size=max_batch_size, controls=CONTROLS)
    some = [of(7, START), of(7), of(7, END), of(8, START | END)]
    queue.add(*some)
    while queue.run():
        pass
    assert [control_values(one.inference) for one in some] == [
        (1, -1, True, 7), (0, -1, True, 7), (0, 1, True, 7), (1, 1, True, 8)
    ]  # fmt: skip
    tensors = [some[0].inference.inputs[control.name] for control in CONTROLS]
    assert {tensor.shape for tensor in tensors} == {shape}
    assert [tensor.data_type.name for tensor in tensors] == ["INT32", "FP32", "BOOL", "UINT64"]
    assert set(some[0].inference.request.inputs) == {"X"}


@pytest.mark.parametrize(
    ("data_type", "name", "value"),
    [
        ("TYPE_INT32", 2**32 + 5, 5),
        ("TYPE_UINT32", 2**33 + 6, 6),
        ("TYPE_INT64", 7, 7),
        ("TYPE_STRING", "é", "é".encode()),
    ],
)
def test_a_correlation_id_has_the_type_of_the_control(data_type, name, value):
    control = Control(name="C", kind="CONTROL_SEQUENCE_CORRID", data_type=data_type)
    queue = driver(controls=(control,))
    one = of(name, START)
    queue.add(one)
    queue.run()
    assert one.inference.inputs["C"].array.tolist() == [[value]]
    assert one.inference.inputs["C"].data_type.config_name == data_type


@pytest.mark.parametrize(
    ("data_type", "name", "given", "expected"),
    [("TYPE_UINT64", "five", "BYTES", "UINT64"), ("TYPE_STRING", 5, "UINT64", "BYTES")],
)
def test_a_correlation_id_of_another_type_than_the_control_is_rejected(data_type, name, given, expected):
    control = Control(name="C", kind="CONTROL_SEQUENCE_CORRID", data_type=data_type)
    with pytest.raises(InferenceError) as raised:
        driver(controls=(control,)).add(of(name, START, request_id="r1"))
    assert raised.value.message == (
        f"[request id: r1] sequence batching control 'C' data-type is '{given}', "
        f"but model 'm' expects '{expected}'"
    )


def test_empty_lower_slots_are_filled_with_null_requests_that_are_not_ready():
    queue = driver(controls=CONTROLS)
    a1, b1, b2 = of(1, START), of(2, START), of(2, shape=(6,))
    queue.add(a1, b1)
    assert queue.run() == [a1, b1]
    queue.add(b2)
    batch = queue.queue.start(0, queue.plan().batch, now_ns=queue.now_ns)
    null, last = batch
    assert last is b2.inference
    assert control_values(null) == (0, -1, False, 0)
    assert null.inputs["X"].shape == (1, 6)
    assert not null.inputs["X"].array.any()
    assert (null.request.correlation_id, null.request.flags, null.batch_size) == (0, 0, 1)
    null.send(None, final=True)
    assert queue.queue.done(0, batch, now_ns=queue.now_ns) == []


def test_a_request_of_another_shape_waits_and_its_slot_is_null():
    queue = driver()
    a, b, c = of(1, START), of(2, START, shape=(5,)), of(3, START)
    queue.add(a, b, c)
    assert queue.run() == [a, None, c]
    assert queue.run() == [None, b]


def test_the_oldest_request_determines_the_shape_of_the_batch():
    queue = driver()
    a1, b = of(1, START), of(2, START, shape=(5,))
    queue.add(a1, b)
    assert queue.run() == [a1]
    queue.pass_time(1)
    a2 = of(1)
    queue.add(a2)
    assert [queue.run(), queue.run()] == [[None, b], [a2]]


@STRATEGIES
def test_sequences_with_states_of_different_shapes_do_not_share_a_batch(strategy, tmp_path):
    queue = driver(strategy, path=tmp_path, states=(state("S", dims=(-1,)),))
    a1, b1 = of(1, START), of(2, START)
    queue.add(a1, b1)
    assert queue.take() == [a1, b1]
    a2 = of(1)
    queue.add(a2)  # while the first runs: its next state is not known yet
    a1.inference.states["S"] = Tensor("S", np.ones((1, 2), np.float32))
    queue.finish([a1, b1])
    b2, c1 = of(2), of(3, START)
    queue.add(b2, c1)
    assert [one for one in queue.run() if one] == [a2]
    assert [one for one in queue.run() if one] == [b2, c1]


def test_direct_waits_until_enough_slots_have_work_or_the_delay_is_over():
    queue = driver(DirectStrategy(minimum_slot_utilization=0.5, max_queue_delay_us=2000))
    a, b, c = (of(name, START) for name in "abc")
    queue.add(a)
    assert queue.plan() == ((), queue.now_ns + 2_000_000)
    queue.add(b)
    assert queue.run() == [a, b]
    queue.add(c)
    assert queue.run() == []
    queue.pass_time(2)
    assert queue.run() == [None, None, c]


@STRATEGIES
def test_an_idle_sequence_frees_its_slot_and_must_start_again(strategy):
    queue = driver(strategy, max_batch_size=1, max_sequence_idle_us=5000)
    a, b = of(1, START), of(2, START)
    queue.add(a, b)
    assert [queue.run(), queue.run()] == [[a], []]
    queue.pass_time(4.999)
    assert queue.run() == []
    queue.pass_time(0.001)
    assert queue.run() == [b]
    with pytest.raises(InferenceError, match="must specify the START flag"):
        queue.add(of(1))


@STRATEGIES
def test_a_sequence_is_not_idle_while_its_requests_wait(strategy):
    queue = driver(strategy, max_batch_size=1, max_sequence_idle_us=5000)
    a, b1, b2 = of(1, START), of(2, START), of(2)
    queue.add(a, b1)
    queue.run()
    queue.pass_time(4)
    queue.add(of(1, END))
    queue.pass_time(4)
    queue.run()
    assert queue.run() == [b1]
    queue.add(b2)
    queue.pass_time(20)
    assert queue.run() == [b2]


def test_a_sequence_that_runs_longer_than_the_idle_limit_ends():
    queue = driver(max_sequence_idle_us=5000)
    queue.add(of(1, START))
    batch = queue.take()
    assert queue.pass_time(6) == []
    queue.finish(batch)
    with pytest.raises(InferenceError, match="must specify the START flag"):
        queue.add(of(1))


def test_a_sequence_that_waits_too_long_for_a_slot_is_rejected_completely():
    queue = driver(max_batch_size=1)
    b1, b2 = of(2, START), of(2, timeout_us=3000)
    queue.add(of(1, START), b1)
    queue.pass_time(1)
    queue.add(b2)
    assert queue.pass_time(3) == [b1, b2]
    assert {one.error for one in (b1, b2)} == {"timeout of the corresponding sequence has been expired"}
    assert b1.inference.error.status is Status.UNAVAILABLE
    with pytest.raises(InferenceError, match="must specify the START flag"):
        queue.add(of(2))


def test_a_timeout_is_ignored_once_the_sequence_has_a_slot():
    queue = driver()
    a = of(1, START, timeout_us=1000)
    queue.add(a)
    assert queue.pass_time(5) == []
    assert queue.run() == [a]


@STRATEGIES
def test_cancelling_a_request_cancels_later_ones_and_frees_the_slot(strategy):
    queue = driver(strategy, max_batch_size=1)
    a = [of(1, START), of(1), of(1), of(1)]
    b = of(2, START)
    queue.add(*a, b)
    assert queue.cancel(a[2]) == a[2:]
    assert [queue.run() for _ in range(3)] == [[a[0]], [a[1]], [b]]
    with pytest.raises(InferenceError, match="must specify the START flag"):
        queue.add(of(1))


@STRATEGIES
def test_cancelling_the_next_request_frees_the_slot_immediately(strategy):
    queue = driver(strategy, max_batch_size=1)
    a, b = of(1, START), of(2, START)
    queue.add(a, b)
    assert queue.cancel(a) == [a]
    assert queue.run() == [b]


def test_cancelling_a_request_without_a_slot_cancels_its_whole_sequence():
    queue = driver(max_batch_size=1)
    a, b1, b2 = of(1, START | END), of(2, START), of(2)
    queue.add(a, b1, b2)
    assert queue.cancel(b2) == [b1, b2]
    assert [queue.run(), queue.run()] == [[a], []]


def state(input_name, **kwargs) -> StateSpec:
    return StateSpec(input_name=input_name, output_name=f"{input_name}_out", data_type="TYPE_FP32", **kwargs)


def test_states_belong_to_a_sequence_and_are_reset_at_its_start(tmp_path):
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "two").write_bytes(np.array([5, 6, 7], "<f4").tobytes())
    initial = InitialState(data_type="TYPE_FP32", dims=(2,), data_file="two")
    queue = driver(
        path=tmp_path, states=(state("S", dims=(-1,), initial_state=initial), state("T", dims=(-1, 3)))
    )
    a1, a2, b1, again = of(1, START), of(1), of(2, START), of(1, START)
    queue.add(a1, b1)
    queue.take()
    assert a1.inference.states["S"].array.tolist() == [[5, 6]]
    assert a1.inference.states["T"].shape == (1, 1, 3)
    a1.inference.states["S"].array[:] = 9  # a model may work in place
    a1.inference.states["T"] = Tensor("T", np.ones((1, 2, 3), np.float32))
    queue.finish([a1, b1])
    queue.add(a2, again)
    queue.run()
    assert a2.inference.states["S"].array.tolist() == [[9, 9]]
    assert a2.inference.states["T"].shape == a2.inference.inputs["T"].shape == (1, 2, 3)
    assert b1.inference.states["S"].array.tolist() == [[5, 6]]
    queue.run()
    assert again.inference.states["S"].array.tolist() == [[5, 6]]


def test_a_null_request_has_its_own_states(tmp_path):
    queue = driver(path=tmp_path, states=(state("S", dims=(2,)),))
    a, b1, b2 = of(1, START), of(2, START), of(2)
    queue.add(a, b1)
    queue.run()
    queue.add(b2)
    null, last = queue.queue.start(0, queue.plan().batch, now_ns=queue.now_ns)
    assert null.states["S"].shape == last.states["S"].shape == (1, 2)
    assert null.states["S"] is not a.inference.states["S"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "failed to open text file for read"),
        (b"1234", "initial_state setting expects 8 bytes, but the data provided from twoonly has 4 bytes."),
    ],
)
def test_a_data_file_that_is_missing_or_too_short_is_an_error_of_the_repository(tmp_path, content, message):
    (tmp_path / "initial_state").mkdir()
    if content:
        (tmp_path / "initial_state" / "two").write_bytes(content)
    initial = InitialState(data_type="TYPE_FP32", dims=(2,), data_file="two")
    with pytest.raises(RepositoryError, match=message):
        driver(path=tmp_path, states=(state("S", dims=(2,), initial_state=initial),))


def test_states_of_strings_begin_empty(tmp_path):
    spec = StateSpec(input_name="S", output_name="O", data_type="TYPE_STRING", dims=(-1,))
    queue = driver(path=tmp_path, max_batch_size=0, states=(spec,))
    one = of(1, START)
    queue.add(one)
    queue.run()
    assert one.inference.states["S"].array.tolist() == [b""]
    assert one.inference.states["S"].data_type is DataType.BYTES


def iterate(queue: QueueDriver, *, again) -> list[SentRequest]:
    """Run the planned batch, and reschedule the requests of `again`."""
    batch = queue.take()
    for one in batch:
        if one in again:
            one.inference.reschedule = True
    queue.finish(batch)
    return batch


@STRATEGIES
def test_iterative_requests_run_until_released_batched_with_others(strategy):
    queue = driver(strategy, iterative=True, controls=CONTROLS)
    long, short = SentRequest(), SentRequest()
    queue.add(long)
    assert iterate(queue, again=[long]) == [long]
    assert (long.inference.request.correlation_id, long.inference.request.flags) == (1, 0)
    queue.add(short)
    assert set(iterate(queue, again=[long])) == {long, short}
    assert control_values(long.inference) == (0, -1, True, 1)
    assert control_values(short.inference) == (1, -1, True, 2)
    assert iterate(queue, again=[]) == [long]
    assert iterate(queue, again=[]) == []
    assert long.error is None


@STRATEGIES
def test_ids_assigned_by_the_server_differ_from_those_of_clients(strategy):
    queue = driver(strategy, iterative=True, max_batch_size=8)
    named, unnamed, later = of(1, START), SentRequest(), of(2, START)
    queue.add(named, unnamed, later)
    everyone = [named, unnamed, later]
    assert named.inference.request.correlation_id != unnamed.inference.request.correlation_id
    assert set(iterate(queue, again=everyone)) == set(everyone)
    assert set(iterate(queue, again=[unnamed])) == set(everyone)
    assert unnamed in iterate(queue, again=[])
    assert [one.error for one in everyone] == [None] * 3


def test_an_iterative_request_frees_its_slot_when_released():
    queue = driver(iterative=True, max_batch_size=1)
    first, second = SentRequest(), SentRequest()
    queue.add(first, second)
    assert [iterate(queue, again=[first]), iterate(queue, again=[]), iterate(queue, again=[])] == [
        [first], [first], [second]
    ]  # fmt: skip


def test_an_iterative_request_cancelled_while_running_is_not_rescheduled():
    queue = driver(iterative=True, max_batch_size=1)
    first, second = SentRequest(), SentRequest()
    queue.add(first, second)
    batch = queue.take()
    first.inference.reschedule = True
    assert queue.cancel(first) == []
    queue.finish(batch)
    assert first.inference.error.status is Status.CANCELLED
    assert queue.run() == [second]


def test_an_iteration_longer_than_the_idle_limit_fails_in_tritons_words():
    queue = driver(iterative=True, max_sequence_idle_us=5000)
    one = SentRequest()
    queue.add(one)
    batch = queue.take()
    one.inference.reschedule = True
    queue.pass_time(6)
    queue.send(queue.queue.done(0, [one.inference], now_ns=queue.now_ns))
    assert batch == [one]
    assert one.error == f"inference request for sequence 1 to model 'm' {NO_START}"


@STRATEGIES
def test_when_an_instance_dies_its_sequences_are_lost_and_others_are_not(strategy):
    queue = driver(strategy, max_batch_size=1, num_instances=2)
    a1, a2, b, c = of(1, START), of(1), of(2, START), of(3, START)
    queue.add(a1, a2, b, c)
    assert queue.queue.abandon(0, now_ns=queue.now_ns) == [a1.inference, a2.inference]
    queue.add(of(2, END))
    assert queue.run(1) == [b]
    queue.run(1)
    assert queue.run(1) == [c]
    assert queue.queue.abandon(-1, now_ns=queue.now_ns) == []


@pytest.mark.parametrize("seed", range(40))
def test_under_random_arrivals_nothing_is_lost_and_sequences_keep_their_order(seed):
    choose = random.Random(seed)
    max_batch_size, num_instances = choose.choice([1, 3]), choose.choice([1, 2])
    strategy = choose.choice(
        [DirectStrategy(), OldestStrategy(max_candidate_sequences=choose.choice([0, 2, 5]))]
    )
    iterative = choose.random() < 0.3
    queue = driver(
        strategy,
        max_batch_size=max_batch_size,
        num_instances=num_instances,
        max_sequence_idle_us=choose.choice([3000, 100_000]),
        iterative=iterative,
        controls=CONTROLS,
    )
    running: dict[int, list[SentRequest]] = {}
    ended: list[SentRequest] = []
    started: dict[SentRequest, int] = {}
    sequence_of = {}  # one id can be of several, one after the other

    def step(instance):
        if instance in running:
            batch = running.pop(instance)
            again = [one for one in batch if iterative and choose.random() < 0.5]
            for one in again:
                one.inference.reschedule = True
            queue.finish(batch, instance)
            ended.extend(one for one in batch if one not in again or one.inference.ended)
        else:
            batch = queue.take(instance)
            assert len(batch) <= max_batch_size
            real = [one for one in batch if one is not None]
            assert len({sequence_of[one] for one in real}) == len(real)
            for one in real:
                assert iterative or one not in started
                started[one] = len(started)
            if batch:
                running[instance] = real

    for _ in range(400):
        match choose.randrange(5):
            case 0 | 1:
                flags = choose.choice([START, START, RequestFlags.NONE, END, START | END])
                one = (
                    SentRequest()
                    if iterative
                    else of(choose.randint(1, 6), flags, shape=(choose.choice([4, 4, 5]),))
                )
                with contextlib.suppress(InferenceError):  # it starts no sequence, and belongs to none
                    queue.add(one)
                    sequence_of[one] = queue.queue._sequence_of[one.inference]
            case 2:
                ended += queue.pass_time(choose.choice([0.5, 4]))
            case 3:
                step(choose.randrange(num_instances))
            case 4 if queue.asked and choose.random() < 0.2:
                ended += queue.cancel(choose.choice(queue.asked))
    while len(queue.queue) or running:
        ended += queue.pass_time(1)  # idle sequences leave their slots
        for instance in range(num_instances):
            step(instance)
    assert sorted(map(id, ended)) == sorted(map(id, queue.asked))
    assert all(one.inference.ended for one in queue.asked)
    for sequence in set(sequence_of.values()):
        turns = [started[one] for one in queue.asked if sequence_of[one] is sequence and one in started]
        assert turns == sorted(turns)
