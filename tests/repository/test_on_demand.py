"""Models that requests load, and that leave when they are idle or others need their memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from genserve.errors import SEE_LOG, GenserveError, InferenceError, ModelNotReady, Overloaded
from genserve.repository.on_demand import ModelUse
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from tests.support.live_server import wait_until
from tests.support.python_models import CONFIG, ask, value, write_model

MIB = 2**20
SIZE = 64 * MIB
BUDGET = 2 * SIZE + 32 * MIB    # two models, and what they make of their code
CODE = """
    import triton_python_backend_utils as pb_utils
    from tests.repository.test_on_demand import LOADS

    class TritonPythonModel:
        def initialize(self, args):
            self.name = args["model_name"]
            LOADS.begin(self.name)

        def execute(self, requests):
            x = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", each + 1)]) for each in x]

        def finalize(self):
            LOADS.end(self.name)
"""
CALLS = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            x = pb_utils.Tensor("X", np.zeros(1, np.float32))
            call = pb_utils.InferenceRequest(model_name="b", inputs=[x], requested_output_names=["Y"])
            return [pb_utils.InferenceResponse(call.exec().output_tensors()) for _ in requests]
"""
ENSEMBLE = """
    platform: "ensemble"
    input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
    ensemble_scheduling { step [ {
        model_name: "a" model_version: -1
        input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }
    } ] }
"""


class Loads:
    """The loads of the models of a test.

    Attributes:
        names: the models that have begun to load, in order.
        loaded: those that are loaded now.
        most: the most that were loaded at a time.
        failing: models whose loads fail.
        gates: a load of one of these models waits until the gate is open.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.names: list[str] = []
        self.loaded: set[str] = set()
        self.most = 0
        self.failing: set[str] = set()
        self.gates: dict[str, threading.Event] = {}

    def begin(self, name: str) -> None:
        self.names.append(name)
        if name in self.gates:
            self.gates[name].wait(30)
        if name in self.failing:
            raise ValueError(f"{name} is broken today")
        self.loaded.add(name)
        self.most = max(self.most, len(self.loaded))

    def end(self, name: str) -> None:
        self.loaded.discard(name)


LOADS = Loads()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    LOADS.clear()


def add_model(root: Path, name: str, *, code: str = CODE, size_bytes: int = SIZE, **model: Any) -> None:
    """Write a model whose files have a size, of which the disk stores nothing."""
    folder = write_model(root, name, code=code, **model)
    with (folder / "1" / "weights").open("wb") as file:
        file.truncate(size_bytes)


@contextmanager
def serving(root: Path, *pinned: str, **options: Any) -> Iterator[Repository]:
    settings = RepositoryOptions(
        control_mode=ControlMode.ON_DEMAND, **{"memory_budget_bytes": BUDGET, **options}
    )
    repository = Repository([root], options=settings)
    repository.start(pinned)
    try:
        yield repository
    finally:
        repository.close()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in "abc":
        add_model(tmp_path, name)
    return tmp_path


def use(repository: Repository, name: str, **how: Any) -> Future[ModelUse]:
    assert repository.on_demand is not None
    return repository.on_demand.use(name, **how)


def touch(repository: Repository, name: str, **how: Any) -> None:
    """Use a model for a moment."""
    use(repository, name, **how).result(30).end()


def wait_behind(repository: Repository, name: str) -> tuple[Future[ModelUse], list[ModelUse]]:
    """Use a loaded model until a use has to wait, since a load waits for its memory.

    Returns:
        That use, and those that were granted before, which keep the model loaded.
    """
    uses = [use(repository, name)]

    def waits() -> bool:
        if uses[-1].done():
            uses.append(use(repository, name))
        return not uses[-1].done()

    wait_until(waits)
    *granted, late = uses
    return late, [one.result() for one in granted]


def shut(name: str) -> threading.Event:
    LOADS.gates[name] = gate = threading.Event()
    return gate


def test_requests_that_wait_share_one_load(models: Path) -> None:
    gate = shut("a")
    with serving(models) as repository:
        waiting = [use(repository, "a") for _ in range(5)]
        assert not any(future.done() for future in waiting)
        gate.set()
        for future in waiting:
            future.result(30)
        assert LOADS.names == ["a"]
        assert value(ask(repository, "a", X=[1.0])) == [2.0]


def test_a_failed_load_fails_all_that_wait_and_the_next_request_tries_again(models: Path) -> None:
    gate = shut("a")
    LOADS.failing.add("a")
    with serving(models) as repository:
        waiting = [use(repository, "a") for _ in range(3)]
        wait_until(lambda: LOADS.names)
        gate.set()
        for future in waiting:
            with pytest.raises(InferenceError, match="a is broken today"):
                future.result(30)
        LOADS.failing.clear()
        touch(repository, "a")
        assert LOADS.names == ["a", "a"]


def test_who_leaves_does_not_end_the_load_of_others(models: Path) -> None:
    gate = shut("a")
    with serving(models) as repository:
        first, second = use(repository, "a"), use(repository, "a")
        unwanted = use(repository, "b")
        wait_until(lambda: LOADS.names)
        assert first.cancel()
        assert unwanted.cancel()
        gate.set()
        second.result(30)
        touch(repository, "c")
        assert LOADS.names == ["a", "c"]


def test_the_least_recently_used_model_leaves(models: Path) -> None:
    with serving(models) as repository:
        for name in ("a", "b", "a", "c"):
            touch(repository, name)
        assert LOADS.loaded == {"a", "c"}
        assert repository.on_demand is not None
        assert [one.name for one in repository.on_demand.loaded()] == ["a", "c"]
        assert sum(one.size_bytes for one in repository.on_demand.loaded()) <= BUDGET


def test_a_model_in_use_stays_and_later_requests_for_it_wait_behind(models: Path) -> None:
    with serving(models) as repository:
        of_a, of_b = use(repository, "a").result(30), use(repository, "b").result(30)
        of_c = use(repository, "c")
        late, more_of_a = wait_behind(repository, "a")
        touch(repository, "b")
        assert LOADS.loaded == {"a", "b"}
        for one in (of_a, *more_of_a):
            one.end()
        of_c.result(30)
        assert LOADS.names == ["a", "b", "c"]
        assert not late.done()
        of_b.end()
        of_c.result().end()
        late.result(30)


def test_a_model_that_need_not_leave_any_more_goes_on(models: Path) -> None:
    with serving(models) as repository:
        _, of_b = use(repository, "a").result(30), use(repository, "b").result(30)
        of_c = use(repository, "c")
        late, _ = wait_behind(repository, "a")
        of_b.end()      # sooner than the uses of a
        of_c.result(30)
        late.result(30)
        assert LOADS.names == ["a", "b", "c"]


@pytest.mark.parametrize("failing", ["_loaded_sizes", "_fits", "_in_order_of_use"])
def test_an_unexpected_failure_ends_no_later_load(
    models: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    with serving(models) as repository:
        assert repository.on_demand is not None
        with monkeypatch.context() as patch:
            patch.setattr(repository.on_demand, failing, lambda *_, **__: 1 / 0)
            with pytest.raises(ModelNotReady, match="'a'") as caught:
                touch(repository, "a")
            assert caught.value.remedy == SEE_LOG
        touch(repository, "b")
        touch(repository, "a")


def test_a_load_that_nobody_wants_any_more_lets_the_model_go_on(models: Path) -> None:
    with serving(models) as repository:
        uses = [use(repository, name).result(30) for name in "ab"]
        of_c = use(repository, "c")
        late, _ = wait_behind(repository, "a")
        of_c.cancel()
        late.result(30)
        assert LOADS.names == ["a", "b"]
        assert len(uses) == 2


def test_a_pinned_model_stays(models: Path) -> None:
    with serving(models, "a", keep_alive_s=0.0) as repository:
        assert repository.on_demand is not None
        for name in ("b", "c", "b"):
            touch(repository, name)
        assert "a" in LOADS.loaded
        wait_until(lambda: LOADS.loaded == {"a"})
        [pinned] = repository.on_demand.loaded()
        assert pinned.is_pinned
        repository.unload("a")      # what else would
        wait_until(lambda: not LOADS.loaded)


@pytest.mark.parametrize(("pinned", "size_bytes"), [((), BUDGET + MIB), (("a",), BUDGET - SIZE + MIB)])
def test_a_model_that_does_not_fit_is_refused(models: Path, pinned: tuple[str, ...], size_bytes: int) -> None:
    add_model(models, "large", size_bytes=size_bytes)
    with serving(models, *pinned) as repository:
        touch(repository, "b")
        with pytest.raises(ModelNotReady) as raised:
            use(repository, "large").result(30)
        assert "--model-memory-budget" in raised.value.remedy
        assert LOADS.loaded == {*pinned, "b"}


def test_a_pinned_model_that_cannot_be_loaded_is_an_error_of_the_start(models: Path) -> None:
    LOADS.failing.add("a")
    with serving(models, "a") as repository:
        assert [*repository.errors] == ["a"]
        assert repository.state == "UNAVAILABLE"
    LOADS.clear()
    LOADS.failing.add("a")
    with serving(models) as repository:
        with pytest.raises(InferenceError):
            touch(repository, "a")
        assert repository.state == "READY"      # the others can be used


def test_keep_alive(models: Path) -> None:
    with serving(models, keep_alive_s=3600.0) as repository:
        assert repository.on_demand is not None
        touch(repository, "a")
        touch(repository, "b", keep_alive_s=float("inf"))
        of_a, of_b = repository.on_demand.loaded()
        assert 3500 < of_a.remaining_s <= 3600
        assert of_b.remaining_s == float("inf")
        touch(repository, "b")      # keeps what was said before
        assert repository.on_demand.loaded()[1].remaining_s == float("inf")
        with_a = use(repository, "a", keep_alive_s=0.0).result(30)
        touch(repository, "b", keep_alive_s=0.0)
        wait_until(lambda: LOADS.loaded == {"a"})
        with_a.end()
        wait_until(lambda: not LOADS.loaded)
        assert repository.on_demand.num_unloads == {"idle": 2, "memory": 0, "request": 0}


def test_a_release_waits_for_the_uses(models: Path) -> None:
    with serving(models) as repository:
        assert repository.on_demand is not None
        assert not repository.on_demand.release("a")
        of_a = use(repository, "a").result(30)
        assert repository.on_demand.release("a")
        touch(repository, "b")
        assert LOADS.loaded == {"a", "b"}
        of_a.end()
        wait_until(lambda: LOADS.loaded == {"b"})


def test_a_model_that_has_grown_takes_more_of_the_budget(models: Path) -> None:
    with serving(models) as repository:
        assert repository.on_demand is not None
        touch(repository, "a")
        with (models / "a" / "1" / "weights").open("wb") as file:
            file.truncate(SIZE * 2)
        repository.load("a")
        [of_a] = repository.on_demand.loaded()
        assert of_a.size_bytes >= SIZE * 2
        touch(repository, "b")
        wait_until(lambda: LOADS.loaded == {"b"})


def test_the_steps_of_an_ensemble_come_and_go_with_it(models: Path) -> None:
    write_model(models, "joined", config=ENSEMBLE)
    with serving(models) as repository:
        of_joined = use(repository, "joined").result(30)
        assert value(ask(repository, "joined", X=[1.0])) == [2.0]
        touch(repository, "a", keep_alive_s=0.0)    # the ensemble still needs it
        touch(repository, "b")
        late = use(repository, "c")
        assert LOADS.loaded >= {"a"}
        late.result(30).end()
        assert "a" in LOADS.loaded
        of_joined.end()
        repository.unload("joined")
        wait_until(lambda: "a" not in LOADS.loaded)
        assert not repository.is_ready("joined")


def test_a_broken_step_leaves_nothing_behind(models: Path) -> None:
    write_model(models, "joined", config=ENSEMBLE)
    LOADS.failing.add("a")
    with serving(models) as repository:
        with pytest.raises(InferenceError, match="a is broken today"):
            touch(repository, "joined")
        LOADS.failing.clear()
        touch(repository, "a")
        assert not repository.is_ready("joined")    # nobody asked for it again


def test_the_code_of_a_model_may_call_another_one(models: Path) -> None:
    add_model(models, "calls", code=CALLS)
    with serving(models) as repository:
        of_calls, of_a = use(repository, "calls").result(30), use(repository, "a").result(30)
        waiting = use(repository, "c")      # for the memory of one of the two
        wait_behind(repository, "calls")
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, repository, "calls", X=[0.0])
            wait_until(lambda: repository.on_demand and repository.on_demand.num_waiting == 3)
            of_a.end()
            assert value(answer.result(30)) == [1.0]
        assert LOADS.names[:2] == ["a", "b"]    # who is called comes first
        of_calls.end()
        waiting.result(30)


def test_too_many_that_wait_are_rejected(models: Path) -> None:
    gate = shut("a")
    with serving(models, max_queue=2) as repository:
        waiting = [use(repository, "a") for _ in range(3)]
        with pytest.raises(Overloaded):
            use(repository, "a").result(30)
        gate.set()
        for future in waiting:
            future.result(30)


def test_who_has_left_does_not_count_among_those_that_wait(models: Path) -> None:
    gate = shut("a")
    with serving(models, max_queue=2) as repository:
        waiting = use(repository, "a")
        for _ in range(5):
            assert use(repository, "a").cancel()
        also = use(repository, "a")
        assert not also.done()
        gate.set()
        for future in (waiting, also):
            future.result(30)


def test_who_is_refused_may_wait_for_another_thread_that_asks(models: Path) -> None:
    add_model(models, "large", size_bytes=BUDGET + MIB)
    asked: list[bool] = []

    def ask_elsewhere(_: Future[ModelUse]) -> None:
        assert repository.on_demand is not None
        asking = threading.Thread(target=repository.on_demand.loaded, daemon=True)
        asking.start()
        asking.join(5)
        asked.append(not asking.is_alive())

    gate = shut("a")
    with serving(models) as repository:
        use(repository, "a")    # so that the callback is there before the refusal
        refused = use(repository, "large")
        refused.add_done_callback(ask_elsewhere)
        gate.set()
        with pytest.raises(ModelNotReady):
            refused.result(30)
        wait_until(lambda: asked)
    assert asked == [True]


def test_who_waits_when_the_server_stops_is_rejected(models: Path) -> None:
    with serving(models) as repository:
        uses = [use(repository, name).result(30) for name in "ab"]
        waiting = use(repository, "c")
    with pytest.raises(InferenceError):
        waiting.result(30)
    assert len(uses) == 2
    with pytest.raises(InferenceError):
        use(repository, "c").result(30)


def test_two_of_five_models_under_random_requests(tmp_path: Path) -> None:
    for name in "abcde":
        add_model(tmp_path, name, config=CONFIG)
    used: dict[str, int] = dict.fromkeys("abcde", 0)
    lock, failures = threading.Lock(), []

    def request(rng: random.Random, repository: Repository) -> None:
        name = rng.choice("abcde")
        future = use(repository, name, keep_alive_s=rng.choice([None, 0.0, 0.01, float("inf")]))
        if rng.random() < 0.3:
            future.cancel()
        try:
            taken = future.result(60)
        except CancelledError:
            return
        with lock:
            used[name] += 1
        try:
            time.sleep(rng.random() * 0.002)
            if value(ask(repository, name, X=[1.0])) != [2.0] or name not in LOADS.loaded:
                failures.append(name)
        finally:
            with lock:
                used[name] -= 1
            taken.end()

    def client(seed: int, repository: Repository) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(20):
                request(rng, repository)
        except (GenserveError, TimeoutError) as error:
            failures.append(repr(error))

    with serving(tmp_path) as repository:
        threads = [threading.Thread(target=client, args=(seed, repository)) for seed in range(6)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert repository.on_demand is not None
            assert sum(one.size_bytes for one in repository.on_demand.loaded()) <= BUDGET
            with lock:
                in_use = {name for name, count in used.items() if count}
                assert in_use <= LOADS.loaded
            time.sleep(0.001)
    assert not failures
    assert LOADS.most <= 2
    assert len(LOADS.names) > 5
