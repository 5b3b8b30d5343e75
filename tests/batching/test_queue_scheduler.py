from __future__ import annotations

import gc
import queue
import threading
import time
import weakref

import pytest

from genserve.backends.backend import Placement
from genserve.batching.dynamic_batcher import DynamicQueue
from genserve.batching.model_instance import ModelInstance
from genserve.batching.queue_scheduler import QueueScheduler, Timer, make_scheduler
from genserve.batching.request_queue import DirectQueue
from genserve.batching.sequence_batcher import SequenceQueue
from genserve.config.model_config import (
    DynamicBatching,
    ModelConfig,
    OldestStrategy,
    QueuePolicy,
    SequenceBatching,
)
from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceRequest, InferenceResponse, RequestFlags
from genserve.inference_statistics import ModelStatistics
from tests.batching.queue_driver import SentRequest


class Model:
    """Answers everything; stops before each batch while its gate is shut."""

    def __init__(self, *, is_shut=False, error=None):
        self.batches: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self.error = error
        self.has_batch = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.is_shut = is_shut
        self.closed = threading.Event()

    def execute(self, batch):
        self.batches.put([inference.request.id for inference in batch])
        self.has_batch.release()
        if self.is_shut:
            self.gate.acquire()
        if self.error:
            raise self.error
        for inference in batch:
            inference.send(InferenceResponse(), final=True)

    def close(self):
        self.closed.set()


class Call:
    """A running inference, for which a test can wait."""

    def __init__(self, scheduler, name="", **request):
        self.ended = threading.Event()
        self.inference = Inference(
            request=InferenceRequest(model_name="m", id=name, inputs={}, **request),
            on_response=self._on_response,
        )
        scheduler.submit(self.inference)

    def _on_response(self, response, final):
        self.error = response.error
        self.ended.set()

    def wait(self):
        assert self.ended.wait(30)
        return self.error


@pytest.fixture
def start():
    running = []

    def start(scheduler, *models):
        for number, model in enumerate(models):
            placement = Placement(name=f"m_{number}", kind="CPU")
            instance = ModelInstance(
                lambda model=model: model,
                number=number,
                placement=placement,
                scheduler=scheduler,
                statistics=ModelStatistics(),
            )
            instance.started.result()
            running.append((instance, model, scheduler))

    yield start
    for instance, model, scheduler in running:
        scheduler.close()
        model.is_shut = False
        model.gate.release()
        instance.join()
        assert model.closed.is_set()


def direct(num_instances=1) -> QueueScheduler:
    return QueueScheduler(DirectQueue(), num_instances=num_instances)


def dynamic(num_instances=1, **batching) -> QueueScheduler:
    queue = DynamicQueue(DynamicBatching(**batching), max_batch_size=8, batch_key=lambda inference: None)
    return QueueScheduler(queue, num_instances=num_instances)


@pytest.mark.parametrize("make", [direct, dynamic])
def test_each_request_of_many_threads_is_answered_once(start, make):
    scheduler = make(num_instances=3)
    models = [Model() for _ in range(3)]
    start(scheduler, *models)
    calls: list[list[Call]] = [[] for _ in range(4)]

    def submit(mine):
        for number in range(100):
            mine.append(Call(scheduler, str(number)))
            if number % 10 == 0:
                mine[-1].wait()

    threads = [threading.Thread(target=submit, args=(mine,)) for mine in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(call.wait() is None for mine in calls for call in mine)
    assert sum(len(model.batches.get()) for model in models for _ in range(model.batches.qsize())) == 400
    assert scheduler.num_waiting == 0


def test_the_direct_queue_runs_requests_in_order_one_at_a_time(start):
    scheduler, model = direct(), Model(is_shut=True)
    start(scheduler, model)
    calls = [Call(scheduler, name) for name in "abc"]
    model.is_shut = False
    model.gate.release()
    assert [call.wait() for call in calls] == [None] * 3
    assert [model.batches.get() for _ in range(3)] == [["a"], ["b"], ["c"]]


def test_a_batch_grows_while_the_instance_is_busy(start):
    scheduler, model = dynamic(), Model(is_shut=True)
    start(scheduler, model)
    first = Call(scheduler, "a")
    assert model.has_batch.acquire(timeout=30)
    calls = [first, *(Call(scheduler, name) for name in "bcd")]
    model.is_shut = False
    model.gate.release()
    assert [call.wait() for call in calls] == [None] * 4
    assert [model.batches.get(), model.batches.get()] == [["a"], ["b", "c", "d"]]


def test_a_batch_that_is_not_full_runs_after_its_delay_and_a_full_one_before(start):
    scheduler, model = dynamic(max_queue_delay_us=20_000), Model()
    start(scheduler, model)
    assert Call(scheduler, "a").wait() is None
    patient = dynamic(max_queue_delay_us=3600 * 1_000_000)
    other = Model()
    start(patient, other)
    assert [call.wait() for call in [Call(patient) for _ in range(8)]] == [None] * 8


def test_requests_left_after_a_batch_wake_another_instance(start):
    scheduler = dynamic(num_instances=2, preferred_batch_sizes=(2,), max_queue_delay_us=3600 * 1_000_000)
    models = [Model(is_shut=True), Model(is_shut=True)]
    start(scheduler, *models)
    for name in "abcd":
        Call(scheduler, name)
    for model in models:
        assert model.has_batch.acquire(timeout=30)


@pytest.mark.parametrize("make", [direct, dynamic])
def test_a_cancelled_request_is_answered_while_the_instance_is_busy_and_never_runs(start, make):
    scheduler, model = make(), Model(is_shut=True)
    start(scheduler, model)
    Call(scheduler, "a")
    assert model.has_batch.acquire(timeout=30)
    call = Call(scheduler, "b")
    call.inference.cancel()
    assert call.wait().status is Status.CANCELLED
    model.is_shut = False
    model.gate.release()
    assert Call(scheduler, "c").wait() is None
    assert [model.batches.get(), model.batches.get()] == [["a"], ["c"]]


def test_a_request_that_was_cancelled_before_it_was_submitted_is_answered(start):
    scheduler, model = direct(), Model(is_shut=True)
    call = Call(direct())
    call.inference.cancel()
    start(scheduler, model)
    assert call.wait().status is Status.CANCELLED


def test_a_request_times_out_while_every_instance_is_busy(start):
    policy = QueuePolicy(default_timeout_us=10_000)
    scheduler, model = dynamic(default_queue_policy=policy), Model(is_shut=True)
    start(scheduler, model)
    first = Call(scheduler)
    assert model.has_batch.acquire(timeout=30)
    assert [call.wait().message for call in [Call(scheduler), Call(scheduler)]] == [
        "Request timeout expired"
    ] * 2
    assert not first.ended.is_set()


def test_an_error_of_the_model_fails_its_batch_and_the_instance_continues(start):
    scheduler, model = direct(), Model(error=ValueError("boom"))
    start(scheduler, model)
    assert Call(scheduler).wait().message == "ValueError: boom"
    model.error = None
    assert Call(scheduler).wait() is None


def test_when_the_last_instance_dies_requests_fail_and_new_ones_are_rejected(start):
    scheduler, model = direct(), Model(is_shut=True, error=SystemExit(3))
    start(scheduler, model)
    calls = [Call(scheduler) for _ in range(3)]
    assert model.has_batch.acquire(timeout=30)
    model.gate.release()
    assert calls[0].wait().message == "SystemExit: 3"
    assert {call.wait().message for call in calls[1:]} == {"instance m_0 died: SystemExit: 3"}
    with pytest.raises(InferenceError, match="stopped accepting"):
        Call(scheduler)


def test_when_one_of_two_instances_dies_the_other_continues(start):
    scheduler = direct(num_instances=2)
    dying, living = Model(is_shut=True, error=SystemExit(3)), Model(is_shut=True)
    start(scheduler, dying, living)
    calls = [Call(scheduler) for _ in range(6)]
    assert dying.has_batch.acquire(timeout=30)
    dying.gate.release()
    living.is_shut = False
    living.gate.release()
    messages = [error and error.message for error in (call.wait() for call in calls)]
    assert sorted(map(str, messages)) == ["None"] * 5 + ["SystemExit: 3"]


@pytest.mark.parametrize("make", [direct, dynamic])
def test_waiting_requests_fail_at_close_and_later_ones_are_rejected(start, make):
    scheduler, model = make(), Model(is_shut=True)
    start(scheduler, model)
    running = Call(scheduler)
    assert model.has_batch.acquire(timeout=30)
    waiting = [Call(scheduler, "x") for _ in range(2)]
    scheduler.close()
    for error in (call.wait() for call in waiting):
        assert error.message.startswith("[request id: x] Server is stopping")
        assert error.status is Status.UNAVAILABLE
    with pytest.raises(InferenceError, match=r"^\[request id: x\] Server is stopping") as raised:
        Call(scheduler, "x")
    assert raised.value.status is Status.UNAVAILABLE
    model.is_shut = False
    model.gate.release()
    assert running.wait() is None


def test_an_iterative_request_that_runs_at_close_is_not_rescheduled(start, tmp_path):
    class Endless(Model):
        """Never ends a request."""

        def execute(self, batch):
            self.has_batch.release()
            self.gate.acquire()
            for inference in batch:
                inference.reschedule = True

    config = ModelConfig(name="m", sequence_batching=SequenceBatching(iterative=True))
    queue = SequenceQueue(config, num_instances=1, path=tmp_path)
    scheduler, model = QueueScheduler(queue, num_instances=1), Endless()
    start(scheduler, model)
    call = Call(scheduler)
    assert model.has_batch.acquire(timeout=30)
    scheduler.close()
    model.gate.release()
    assert call.wait() is not None


def test_a_waiting_sequence_gets_the_slot_of_an_idle_one_while_the_instance_sleeps(start, tmp_path):
    config = ModelConfig(name="m", sequence_batching=SequenceBatching(max_sequence_idle_us=20_000))
    scheduler = QueueScheduler(SequenceQueue(config, num_instances=1, path=tmp_path), num_instances=1)
    start(scheduler, Model())
    calls = [
        Call(scheduler, correlation_id=number, flags=RequestFlags.SEQUENCE_START) for number in (1, 2, 3)
    ]
    assert [call.wait() for call in calls] == [None] * 3
    with pytest.raises(InferenceError, match="must specify the START flag"):
        Call(scheduler, correlation_id=1)


def test_iterative_requests_of_many_threads_run_until_released(start, tmp_path):
    class Counting(Model):
        """Answers at the third iteration."""

        def execute(self, batch):
            for inference in batch:
                turns[inference] = turns.get(inference, 0) + 1
                if turns[inference] < 3:
                    inference.reschedule = True
                else:
                    inference.send(InferenceResponse(), final=True)

    turns: dict[Inference, int] = {}
    config = ModelConfig(name="m", max_batch_size=4, sequence_batching=SequenceBatching(iterative=True))
    scheduler = QueueScheduler(SequenceQueue(config, num_instances=2, path=tmp_path), num_instances=2)
    start(scheduler, Counting(), Counting())
    calls = [Call(scheduler) for _ in range(50)]
    assert [call.wait() for call in calls] == [None] * 50
    assert [turns[call.inference] for call in calls] == [3] * 50  # null requests have turns too


def test_a_scheduler_is_not_kept_alive_by_its_timer():
    scheduler = dynamic(default_queue_policy=QueuePolicy(default_timeout_us=3600 * 1_000_000))
    call = Call(scheduler)
    alive = weakref.ref(scheduler)
    del scheduler, call
    gc.collect()
    assert alive() is None


ITS_SEQUENCE = {"correlation_id": 1, "flags": RequestFlags.SEQUENCE_START}


@pytest.mark.parametrize(
    ("config", "asked", "num_together"),
    [
        ({}, {}, 1),
        ({"dynamic_batching": DynamicBatching()}, {}, 3),
        ({"sequence_batching": SequenceBatching()}, ITS_SEQUENCE, 1),
        ({"sequence_batching": SequenceBatching(strategy=OldestStrategy(), iterative=True)}, {}, 3),
    ],
    ids=["direct", "dynamic", "sequences", "iterative"],
)
def test_the_config_determines_the_batch(tmp_path, config, asked, num_together):
    scheduler = make_scheduler(
        ModelConfig(name="m", max_batch_size=4, **config), num_instances=1, path=tmp_path
    )
    for _ in range(3):
        scheduler.submit(SentRequest(**asked).inference)
    assert scheduler.num_waiting == 3
    assert len(scheduler.take(0)) == num_together


def test_callbacks_run_in_the_order_of_their_times_and_not_before():
    timer = Timer()
    called: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    now_ns = time.monotonic_ns()
    due = {"late": now_ns + 30_000_000, "early": now_ns + 10_000_000, "past": now_ns - 1}
    for name, when_ns in due.items():
        timer.call_at(when_ns, lambda name=name: called.put((name, time.monotonic_ns())))
    calls = [called.get(timeout=30) for _ in due]
    assert [name for name, _ in calls] == ["past", "early", "late"]
    assert all(at_ns >= due[name] for name, at_ns in calls)


def test_a_callback_that_fails_is_logged_and_the_next_one_runs(caplog):
    timer = Timer()
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    timer.call_at(0, lambda: 1 / 0)
    timer.call_at(1, lambda: called.put("next"))
    assert called.get(timeout=30) == "next"
    assert "ZeroDivisionError" in caplog.text
