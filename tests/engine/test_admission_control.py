"""Which requests are rejected, and when to retry them, by a clock that the test moves."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.engine.admission_control import AdmissionControl, QueueLimits
from genserve.errors import Overloaded
from genserve.generation_metrics import Metrics
from genserve.request_context import KeyShare
from tests.support.representatives import with_extended


def control(*, num_slots: int = 2, **limits: float | None) -> AdmissionControl:
    wanted = QueueLimits(**({"max_requests": 1000} | limits))  # type: ignore[arg-type]
    return AdmissionControl(max_num_seqs=num_slots, limits=wanted, metrics=Metrics().for_model("test"))


def busy(admission: AdmissionControl) -> AdmissionControl:
    """Take both slots."""
    admission.accept(2)
    return admission


def join(admission: AdmissionControl, *, num_tokens: int = 1, priority: int = 0, now_s: float = 0.0) -> None:
    admission.check(1, num_tokens=num_tokens, priority=priority, now_s=now_s)
    admission.accept(1)
    admission.wait(1, num_tokens=num_tokens, priority=priority)


@contextmanager
def rejected_for_a_wait_of(wait_s: int, *, limit_s: float) -> Iterator[None]:
    """Expect a rejection that names the predicted wait and the limit."""
    with pytest.raises(Overloaded, match=rf"\b{wait_s} s\b.*\b{limit_s:g} s\b") as rejected:
        yield
    assert rejected.value.reason == "predicted_wait"


def step(
    admission: AdmissionControl,
    seconds: float,
    *,
    num_started: int = 1,
    full: bool = True,
    num_waiting: int = 1,
    now_s: float = 0.0,
) -> None:
    admission.prediction.record_step(
        seconds, num_started=num_started, full=full, num_waiting=num_waiting, now_s=now_s
    )


@dataclass(eq=False, kw_only=True)
class Request:
    """A request of the simulated engine."""

    num_slots: int
    num_tokens: int
    priority: int
    num_steps: int  # the number of steps until the request ends
    began_s: float = 0.0


class SimulatedEngine:
    """A queue and slots like the engine's; the caller says how long each step takes."""

    def __init__(self, *, num_slots: int, **limits: float | None) -> None:
        self.admission = control(num_slots=num_slots, **limits)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preparing: list[tuple[int, int]] = []  # slots and priority
        self.now_s = 0.0
        self._num_places = num_slots

    @property
    def num_free(self) -> int:
        return self._num_places - sum(request.num_slots for request in self.running)

    def rejection(self, request: Request) -> Overloaded | None:
        """Submit a request; return the error if it was rejected."""
        sizes = {"num_tokens": request.num_tokens, "priority": request.priority}
        try:
            self.admission.check(request.num_slots, now_s=self.now_s, **sizes)
        except Overloaded as error:
            return error
        self.admission.accept(request.num_slots)
        self.admission.wait(request.num_slots, **sizes)
        index = sum(other.priority <= request.priority for other in self.waiting)
        self.waiting.insert(index, request)
        return None

    def submit(self, *, num_steps: int = 1, num_slots: int = 1, priority: int = 0) -> None:
        request = Request(num_slots=num_slots, num_tokens=1, priority=priority, num_steps=num_steps)
        rejected = self.rejection(request)
        assert rejected is None, rejected

    def reserve(self, count: int, *, priority: int) -> None:
        self.admission.reserve(count, priority=priority)
        self.preparing.append((count, priority))

    def release(self) -> None:
        count, priority = self.preparing.pop()
        self.admission.release(count, priority=priority)

    def start(self, request: Request) -> None:
        self.admission.start(request.num_slots, num_tokens=request.num_tokens, priority=request.priority)

    def leave_queue(self, index: int = -1) -> None:
        request = self.waiting[index]
        del self.waiting[index]
        self.start(request)
        self.admission.leave(request.num_slots)

    def step(self, seconds: float) -> None:
        started = []
        while self.waiting and self.waiting[0].num_slots <= self.num_free:
            started.append(self.waiting.popleft())
            started[-1].began_s = self.now_s
            self.running.append(started[-1])
        if not self.running:
            return
        self.now_s += seconds
        step(
            self.admission,
            seconds,
            num_started=sum(request.num_slots for request in started),
            full=bool(self.waiting),
            num_waiting=len(self.waiting),
            now_s=self.now_s,
        )
        for request in started:
            self.start(request)
        for request in self.running:
            request.num_steps -= 1
            if not request.num_steps:
                self.admission.leave(request.num_slots)
                self.admission.prediction.record_end(self.now_s - request.began_s, now_s=self.now_s)
        self.running = [request for request in self.running if request.num_steps]


def served(*, seconds: float = 2.0, **limits: float | None) -> AdmissionControl:
    """Serve a queue, one request in each step; two long answers are left, which hold both slots."""
    engine = SimulatedEngine(num_slots=2, **limits)
    engine.now_s = -12 * seconds  # it is served at 0, the time of `join`
    for num_steps in (1, *[2] * 10, 99, 99):
        engine.submit(num_steps=num_steps)
    while engine.waiting:
        engine.step(seconds)
    assert engine.num_free == 0
    assert abs(engine.now_s) < 1e-6
    return engine.admission


def serve_short_of_memory(admission: AdmissionControl) -> None:
    """Start eight requests, 2 s apart, while a preempted one finds no blocks."""
    for _ in range(8):
        step(admission, 2.0)


def test_prompts_beyond_the_limit_on_tokens_are_rejected() -> None:
    admission = control(max_tokens=10)
    join(admission, num_tokens=6)
    join(admission, num_tokens=4)
    with pytest.raises(Overloaded, match=r"\b10\b") as rejected:
        join(admission, num_tokens=1)
    assert rejected.value.reason == "max_queue_tokens"
    assert "--max-queue-tokens" in rejected.value.remedy
    admission.start(1, num_tokens=6, priority=0)
    join(admission, num_tokens=6)


def test_a_prompt_longer_than_the_limit_is_accepted_if_no_other_waits() -> None:
    admission = control(max_tokens=10)
    join(admission, num_tokens=99)
    with pytest.raises(Overloaded):
        join(admission)


def test_a_request_that_would_wait_too_long_is_rejected_on_arrival() -> None:
    admission = served(max_wait_s=14.5)
    for _ in range(5):
        join(admission)  # the fifth waits for 10 s
    with rejected_for_a_wait_of(12, limit_s=14.5):
        join(admission)


def test_before_the_engine_was_full_no_request_is_rejected_for_its_wait() -> None:
    admission = control(max_wait_s=0.001)
    for _ in range(50):
        join(admission)
    step(admission, 60.0)  # one is not enough for two slots
    join(admission)


def test_before_the_engine_was_full_the_time_that_places_were_held_predicts_the_wait() -> None:
    admission = busy(control(max_wait_s=11.5))
    for seconds in (3.0, 5.0):  # a round of two slots takes 4 s
        admission.prediction.record_end(seconds, now_s=0.0)
    for _ in range(4):
        join(admission)  # the fourth waits for 8 s
    with rejected_for_a_wait_of(12, limit_s=11.5):
        join(admission)
    join(admission, now_s=100.0)  # the measurement is too old


def test_before_the_engine_was_full_the_running_requests_are_expected_to_end_at_their_time() -> None:
    admission = control(max_wait_s=10)
    admission.accept(2)
    step(admission, 1.0, num_started=2, full=False, num_waiting=0, now_s=0.0)
    admission.prediction.record_end(20.0, now_s=0.0)
    with rejected_for_a_wait_of(15, limit_s=10):
        join(admission, now_s=5.0)
    join(admission, now_s=13.0)  # for 7 s


def test_a_queue_that_fits_into_the_free_places_rejects_no_request() -> None:
    admission = control(num_slots=4, max_wait_s=3)
    serve_short_of_memory(admission)
    step(admission, 2.0, full=False, num_waiting=0)
    for _ in range(5):
        join(admission)  # only requests that free slots will take are ahead of the fifth
    with rejected_for_a_wait_of(4, limit_s=3):
        join(admission)


def test_requests_that_start_together_count_until_the_queue_is_empty() -> None:
    admission = control(num_slots=4, max_wait_s=14.5)
    admission.accept(4)
    for _ in range(4):
        step(admission, 8.0, num_started=0, num_waiting=9)
        step(admission, 1.0, num_started=3, full=False, num_waiting=9)  # four slots were free
        step(admission, 1.0, num_started=1, num_waiting=8)
    for _ in range(4):
        join(admission)  # the fourth waits for 10 s
    with rejected_for_a_wait_of(19, limit_s=14.5):  # another pause of 9 s
        join(admission)


def test_no_request_is_accepted_that_would_wait_for_two_rounds_of_answers() -> None:
    engine = SimulatedEngine(num_slots=8, max_wait_s=10)
    for _ in range(24):
        engine.submit(num_steps=7)  # a round of eight answers takes 7 s
    while engine.waiting:
        engine.step(1.0)
    arrived_s: dict[Request, float] = {}
    for _ in range(70):
        engine.step(1.0)
        assert len(engine.running) in (0, 8)  # none at the end of a round
        request = Request(num_slots=1, num_tokens=1, priority=0, num_steps=7)
        while engine.rejection(request) is None:
            arrived_s[request] = engine.now_s
            request = Request(num_slots=1, num_tokens=1, priority=0, num_steps=7)
        # On average, a slot becomes free every 0.875 s, and the ninth would wait for 7.9 s.
        waits_s = [engine.now_s - arrived_s[request] for request in engine.waiting if request in arrived_s]
        assert max(waits_s, default=0) <= 8
    assert len(arrived_s) >= 56


LENGTHS = {
    "one length": lambda draw: 128,
    "nearly one length": lambda draw: draw.randint(110, 140),
    "two lengths": lambda draw: draw.choice([16, 128]),
    "any length": lambda draw: draw.randint(1, 256),
    "many short ones": lambda draw: 1 + int(draw.expovariate(1 / 100)),
}


@pytest.mark.parametrize(
    "lengths", with_extended(LENGTHS.values(), always=list(LENGTHS.values())[:2]), ids=LENGTHS.keys()
)
def test_at_five_times_the_load_nearly_all_rejections_are_immediate(
    lengths: Callable[[random.Random], int],
) -> None:
    engine = SimulatedEngine(num_slots=32, max_wait_s=10)
    draw = random.Random(1)
    mean = sum(lengths(draw) for _ in range(1000)) / 1000
    arrived_s: dict[Request, float] = {}
    num_rejected = num_late = num_steps = num_busy = 0
    while engine.now_s < 150.0:
        is_overloaded = engine.now_s > 30.0  # before, there are as many clients as slots
        for _ in range(5 * (draw.random() < 32 / mean) if is_overloaded else engine.num_free):
            request = Request(num_slots=1, num_tokens=1, priority=0, num_steps=lengths(draw))
            arrived_s[request] = engine.now_s
            num_rejected += engine.rejection(request) is not None
        while engine.waiting and engine.now_s - arrived_s[engine.waiting[0]] > 10.0:
            engine.leave_queue(0)
            num_late += 1
        engine.step(0.05 * draw.uniform(0.8, 1.2))
        num_steps += 1
        num_busy += len(engine.running)
    assert num_late <= num_rejected / 100
    assert num_busy >= 0.95 * 32 * num_steps


def test_free_places_do_not_help_if_blocks_are_short() -> None:
    admission = control(num_slots=4, max_wait_s=3)
    serve_short_of_memory(admission)
    join(admission)
    with rejected_for_a_wait_of(4, limit_s=3):
        join(admission)


def test_the_prediction_follows_an_engine_that_becomes_slower() -> None:
    admission = served(seconds=0.1, max_wait_s=10)
    join(admission)
    step(admission, 90.0, num_started=0)
    with pytest.raises(Overloaded) as rejected:
        join(admission)
    assert rejected.value.reason == "predicted_wait"


def test_requests_of_lower_priority_do_not_count_for_one_of_higher_priority() -> None:
    admission = served(max_wait_s=14.5)
    for _ in range(5):
        join(admission, priority=1)
    with pytest.raises(Overloaded):
        join(admission, priority=1)
    join(admission, priority=0)


def test_rejected_requests_get_increasing_retry_times() -> None:
    admission = served(max_wait_s=11.5)
    for _ in range(4):
        join(admission, now_s=50.0)
    retry_after_s = []
    for _ in range(12):
        with pytest.raises(Overloaded) as rejected:
            join(admission, now_s=50.0)
        retry_after_s.append(rejected.value.retry_after_s)
    assert retry_after_s == pytest.approx([*range(1, 12), 11.5])  # later the queue might be empty
    with pytest.raises(Overloaded) as rejected:
        join(admission, now_s=55.0)
    assert rejected.value.retry_after_s == pytest.approx(7.5)


def test_without_a_measurement_the_retry_time_is_half_a_second() -> None:
    admission = control(max_requests=0, num_slots=1)
    join(admission)
    with pytest.raises(Overloaded) as rejected:
        join(admission)
    assert rejected.value.reason == "max_queue"
    assert rejected.value.retry_after_s == pytest.approx(0.5)


def test_a_queue_that_all_requests_left_is_forgotten() -> None:
    admission = control(num_slots=4, max_wait_s=3)
    serve_short_of_memory(admission)
    join(admission)
    admission.start(1, num_tokens=1, priority=0)
    admission.leave(1)
    for _ in range(4):
        join(admission)


def takes_short_one(engine: SimulatedEngine) -> bool:
    try:
        engine.admission.check(1, num_tokens=1, priority=0, now_s=engine.now_s)
    except Overloaded:
        return False
    return True


@given(data=st.data(), num_slots=st.integers(1, 4))
def test_a_free_place_rejects_no_request_and_all_counts_return_to_zero(
    data: st.DataObject, num_slots: int
) -> None:
    engine = SimulatedEngine(num_slots=num_slots, max_requests=20, max_tokens=50, max_wait_s=10)
    requests = st.builds(
        Request,
        num_slots=st.integers(1, num_slots),
        num_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        num_steps=st.integers(1, 4),
    )
    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(("submit", "submit", "step", "step", "reserve", "release", "leave"))):
            case "submit":
                request = data.draw(requests)
                is_free = engine.num_free > 0 and not (engine.waiting or engine.preparing)
                num_slots_now = engine.admission.num_free(now_s=engine.now_s)
                assert (num_slots_now > 0) == takes_short_one(engine)
                rejected = engine.rejection(request)
                assert rejected is None or not is_free
            case "step":
                engine.step(data.draw(st.sampled_from((0.01, 1.0, 25.0, 100.0))))
            case "reserve":
                engine.reserve(1, priority=data.draw(st.integers(0, 2)))
            case "release" if engine.preparing:
                engine.release()
            case "leave" if engine.waiting:
                engine.leave_queue()
    while engine.preparing:
        engine.release()
    while engine.waiting or engine.running:
        engine.step(1.0)
    admission = engine.admission
    assert (admission.num_accepted, admission.num_waiting_tokens, admission.num_preparing) == (0, 0, 0)
    admission.check(admission.capacity, num_tokens=99, priority=0, now_s=engine.now_s)


def one_slot_after_slow_answers() -> SimulatedEngine:
    """Serve a burst of answers of 20 s, one at a time."""
    engine = SimulatedEngine(num_slots=1, max_wait_s=10)
    for _ in range(8):
        engine.submit()
    for _ in range(8):
        engine.step(20.0)
    return engine


def test_after_a_burst_of_slow_answers_short_ones_update_the_measurement() -> None:
    engine = one_slot_after_slow_answers()
    errors = []
    for _ in range(30):
        for _ in range(2):  # one runs, and one waits
            errors.append(engine.rejection(Request(num_slots=1, num_tokens=1, priority=0, num_steps=1)))
        engine.step(0.1)
    assert errors[0] is None
    assert not any(errors[-20:])


def test_one_request_may_wait_alone_unless_all_answers_were_long() -> None:
    engine = one_slot_after_slow_answers()
    engine.submit(num_steps=9)
    engine.step(0.1)
    alone = Request(num_slots=1, num_tokens=1, priority=0, num_steps=1)
    assert "would wait about 20 s" in str(engine.rejection(alone))
    engine.step(13.1)
    assert engine.rejection(alone) is None  # 6.9 s are left
    behind = engine.rejection(Request(num_slots=1, num_tokens=1, priority=0, num_steps=1))
    assert "would wait" in str(behind)


def test_an_old_measurement_rejects_no_request() -> None:
    engine = one_slot_after_slow_answers()
    engine.now_s += 100.0
    for _ in range(5):
        engine.submit()
    engine.step(0.1)  # full again, and fast
    engine.submit()


def test_places_of_requests_in_preparation_are_taken() -> None:
    admission = control(num_slots=1, max_requests=1)
    admission.reserve(1, priority=0)
    join(admission)
    with pytest.raises(Overloaded, match=r"\b2\b.*\b2\b") as rejected:
        admission.check_count(1, now_s=0.0)
    assert rejected.value.reason == "max_queue"
    admission.release(1, priority=0)
    admission.check_count(1, now_s=0.0)


def test_requests_in_preparation_count_for_the_predicted_wait() -> None:
    admission = served(max_wait_s=10)
    admission.reserve(5, priority=0)
    with rejected_for_a_wait_of(12, limit_s=10):
        join(admission)


def test_a_key_may_use_its_share_of_a_queue_that_another_key_fills() -> None:
    admission = control(num_slots=2, max_requests=10, max_wait_s=1)
    flood, other = KeyShare("flood"), KeyShare("other", 2)
    admission.accept(12, share=flood)
    with pytest.raises(Overloaded):
        admission.check(1, num_tokens=1, priority=0, now_s=0, share=flood)
    for _ in range(8):  # two thirds of 12
        admission.check(1, num_tokens=1, priority=0, now_s=0, share=other)
        admission.accept(1, share=other)
    with pytest.raises(Overloaded):
        admission.check(1, num_tokens=1, priority=0, now_s=0, share=other)
    admission.leave(12, share=flood)
    admission.check(1, num_tokens=1, priority=0, now_s=0, share=other)


def test_a_key_alone_has_the_limits_of_the_queue() -> None:
    admission, share = control(num_slots=2, max_requests=1), KeyShare("one")
    admission.accept(3, share=share)
    with pytest.raises(Overloaded):
        admission.check(1, num_tokens=1, priority=0, now_s=0, share=share)
