"""The ensemble's graph, over a server of small functions that answer on a thread of their own."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from genserve.config.model_config import EnsembleStep, ModelConfig, TensorSpec
from genserve.errors import InferenceError, Status
from genserve.inference import Backlog, Inference, InferenceRequest, InferenceResponse, OnResponse
from genserve.inference_statistics import ModelStatistics
from genserve.repository.ensemble import Ensemble, _Flow
from genserve.repository.model_versions import ModelVersion
from genserve.tensor import Tensor

Function = Callable[[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]


class FunctionServer:
    """A server to functions: from arrays to the responses of a model."""

    def __init__(self, **functions: Function) -> None:
        self.functions = functions
        self.seen: list[InferenceRequest] = []
        self.pool = ThreadPoolExecutor(4)

    def submit(self, inference: Inference) -> None:
        self.seen.append(inference.request)
        if inference.request.model_name not in self.functions:
            raise InferenceError("there is none", status=Status.NOT_FOUND)
        self.pool.submit(self._run, inference)

    def is_ready(self, name: str, version: int = -1) -> bool:
        return name in self.functions

    def _run(self, inference: Inference) -> None:
        try:
            function = self.functions[inference.request.model_name]
            answers = function({name: tensor.array for name, tensor in inference.inputs.items()})
        except InferenceError as error:
            inference.fail(error)
            return
        if len(answers) == 1:
            inference.send(_response(answers[0]), final=True)
            return
        for answer in answers:
            inference.send(_response(answer), final=False)
        inference.send(None, final=True)


class HeldServer:
    """Models that answer when the test answers for them, except those in `takers`."""

    def __init__(self) -> None:
        self.held: dict[str, list[Inference]] = {}
        self.takers: dict[str, Callable[[Inference], None]] = {}

    def submit(self, inference: Inference) -> None:
        name = inference.request.model_name
        self.takers.get(name, self.held.setdefault(name, []).append)(inference)


def _response(arrays: dict[str, np.ndarray]) -> InferenceResponse:
    return InferenceResponse(outputs=tuple(Tensor(name, array) for name, array in arrays.items()))


def spec(name: str, *dims: int, optional: bool = False) -> TensorSpec:
    return TensorSpec(name=name, data_type="TYPE_FP32", dims=dims or (-1,), optional=optional)


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> EnsembleStep:
    return EnsembleStep(
        model_name=model,
        model_version=-1,
        input_map=MappingProxyType(inputs),
        output_map=MappingProxyType(outputs),
    )


def served(
    server: FunctionServer | HeldServer,
    models: dict[str, ModelConfig],
    *steps: EnsembleStep,
    inputs=("x",),
    outputs=("y",),
    limit: int = 0,
) -> ModelVersion:
    config = ModelConfig(
        name="e",
        platform="ensemble",
        inputs=tuple(spec(name, optional=name.endswith("?")) for name in inputs),
        outputs=tuple(spec(name) for name in outputs),
        ensemble_steps=steps,
        max_inflight_requests=limit,
    )
    statistics = ModelStatistics()
    graph = Ensemble(
        config, server=server, config_of=lambda step: models[step.model_name], statistics=statistics
    )
    return ModelVersion(graph, config=config, version=1, statistics=statistics)


def inference_of(on_response: OnResponse, wanted: tuple[str, ...] = (), **arrays: np.ndarray) -> Inference:
    request = InferenceRequest(
        model_name="e",
        id="7",
        inputs={name: Tensor(name, np.asarray(array, np.float32)) for name, array in arrays.items()},
        requested_outputs=wanted,
    )
    return Inference(request=request, on_response=on_response)


def ask(
    model: ModelVersion, wanted: tuple[str, ...] = (), **arrays: np.ndarray
) -> list[InferenceResponse | None]:
    """All that comes, in order; `None` stands for an end that came alone."""
    arrived: queue.SimpleQueue[tuple[InferenceResponse | None, bool]] = queue.SimpleQueue()
    inference = inference_of(lambda response, final: arrived.put((response, final)), wanted, **arrays)
    model.submit(inference)
    responses = []
    while True:
        response, final = arrived.get(timeout=10)
        responses.append(response)
        if final:
            return responses


def values(responses: list[InferenceResponse | None], name: str = "y") -> list[list[float]]:
    return [r.output(name).array.tolist() for r in responses if r is not None]


def model(name: str, inputs=("a",), outputs=("b",), *, decoupled: bool = False) -> ModelConfig:
    return ModelConfig(
        name=name,
        inputs=tuple(spec(n, optional=n.endswith("?")) for n in inputs),
        outputs=tuple(spec(n) for n in outputs),
        decoupled=decoupled,
    )


def test_steps_run_in_the_order_of_their_tensors_not_of_the_list():
    server = FunctionServer(
        double=lambda t: [{"b": t["a"] * 2}], increase=lambda t: [{"b": t["a"] + 1}]
    )
    ensemble = served(
        server,
        {"double": model("double"), "increase": model("increase")},
        step("increase", {"a": "doubled"}, {"b": "y"}),
        step("double", {"a": "x"}, {"b": "doubled"}),
    )
    [response] = ask(ensemble, x=[1, 2])
    assert values([response]) == [[3, 5]]
    assert [request.model_name for request in server.seen] == ["double", "increase"]
    assert {request.id for request in server.seen} == {"7"}
    assert ensemble.statistics.success.count == ensemble.statistics.inference_count == 1
    assert ensemble.statistics.execution_count == 1


def test_two_branches_meet_again():
    server = FunctionServer(
        double=lambda t: [{"b": t["a"] * 2}],
        increase=lambda t: [{"b": t["a"] + 1}],
        add=lambda t: [{"s": t["p"] + t["q"]}],
    )
    ensemble = served(
        server,
        {"double": model("double"), "increase": model("increase"), "add": model("add", ("p", "q"), ("s",))},
        step("double", {"a": "x"}, {"b": "l"}),
        step("increase", {"a": "x"}, {"b": "r"}),
        step("add", {"p": "l", "q": "r"}, {"s": "y"}),
    )
    for number in range(50):
        assert values(ask(ensemble, x=[number])) == [[number * 3 + 1]]


def test_each_response_of_a_decoupled_step_runs_the_later_steps():
    server = FunctionServer(
        repeat=lambda t: [{"b": t["a"] + k} for k in range(3)],
        slow=lambda t: [{"b": t["a"] * 100}],
        add=lambda t: [{"s": t["p"] + t["q"]}],
    )
    ensemble = served(
        server,
        {
            "repeat": model("repeat", decoupled=True),
            "slow": model("slow"),
            "add": model("add", ("p", "q"), ("s",)),
        },
        step("repeat", {"a": "x"}, {"b": "part"}),
        step("slow", {"a": "x"}, {"b": "side"}),
        step("add", {"p": "part", "q": "side"}, {"s": "y"}),
    )
    for _ in range(30):
        responses = ask(ensemble, x=[1])
        assert sorted(values(responses)) == [[101], [102], [103]]


def test_a_decoupled_step_without_responses_ends_the_request_without_one():
    server = FunctionServer(repeat=lambda t: [], increase=lambda t: [{"b": t["a"] + 1}])
    ensemble = served(
        server,
        {"repeat": model("repeat", decoupled=True), "increase": model("increase")},
        step("repeat", {"a": "x"}, {"b": "part"}),
        step("increase", {"a": "part"}, {"b": "y"}),
    )
    assert ask(ensemble, x=[1]) == [None]


def test_the_cost_of_a_response_does_not_grow_with_those_in_flight(monkeypatch):
    server = HeldServer()
    ensemble = served(
        server,
        {"repeat": model("repeat", decoupled=True), "hold": model("hold")},
        step("repeat", {"a": "x"}, {"b": "part"}),
        step("hold", {"a": "part"}, {"b": "y"}),
    )
    arrived = []
    inference = inference_of(lambda response, final: arrived.append(final), x=[1])
    ensemble.submit(inference)
    looks = []
    settled = _Flow.settled
    monkeypatch.setattr(_Flow, "settled", property(lambda flow: looks.append(flow) or settled.fget(flow)))
    costs = []
    for number in range(50):
        looks.clear()
        server.held["repeat"][0].send(_response({"b": np.float32([number])}), final=False)
        costs.append(len(looks))
    assert len(inference.parts) == 51
    for part in server.held["hold"]:
        looks.clear()
        part.send(_response({"b": np.float32([0])}), final=True)
        costs.append(len(looks))
    assert max(costs) < 20
    assert inference.parts == server.held["repeat"]
    server.held["repeat"][0].send(None, final=True)
    assert arrived == [False] * 50 + [True]


def test_nested_streams_end_with_the_last_response():
    server = FunctionServer(
        repeat=lambda t: [{"b": t["a"] * 10 + k} for k in range(3)],
        increase=lambda t: [{"b": t["a"] + 1}],
    )
    ensemble = served(
        server,
        {"repeat": model("repeat", decoupled=True), "increase": model("increase")},
        step("repeat", {"a": "x"}, {"b": "part"}),
        step("repeat", {"a": "part"}, {"b": "smaller"}),
        step("increase", {"a": "smaller"}, {"b": "y"}),
    )
    for _ in range(30):
        responses = ask(ensemble, x=[0])
        assert sorted(values(responses)) == [[10 * tens + ones + 1] for tens in range(3) for ones in range(3)]


def test_no_step_starts_after_another_has_failed():
    server = HeldServer()
    ensemble = served(
        server,
        {"fail": model("fail"), "slow": model("slow"), "last": model("last")},
        step("fail", {"a": "x"}, {"b": "z"}),
        step("slow", {"a": "x"}, {"b": "m"}),
        step("last", {"a": "m"}, {"b": "y"}),
        outputs=("y", "z"),
    )
    arrived = []
    ensemble.submit(inference_of(lambda response, final: arrived.append(response.error.message), x=[1]))
    server.held["fail"][0].fail(InferenceError("no luck"))
    server.held["slow"][0].send(_response({"b": np.float32([1])}), final=True)
    assert arrived == ["in ensemble 'e', no luck"]
    assert "last" not in server.held


def test_an_error_names_the_ensemble_and_keeps_its_status():
    def fail(tensors):
        raise InferenceError("no luck", status=Status.UNAVAILABLE)

    server = FunctionServer(fail=fail, increase=lambda t: [{"b": t["a"] + 1}])
    ensemble = served(
        server,
        {"fail": model("fail"), "increase": model("increase")},
        step("fail", {"a": "x"}, {"b": "m"}),
        step("increase", {"a": "m"}, {"b": "y"}),
    )
    [response] = ask(ensemble, x=[1])
    assert response.error.message == "in ensemble 'e', no luck"
    assert response.error.status is Status.UNAVAILABLE
    assert ensemble.statistics.fail.count == 1


def test_a_missing_optional_tensor_skips_the_steps_that_need_it():
    server = FunctionServer(
        either=lambda t: [{"b": t["a"] + t.get("c?", 0)}], need=lambda t: [{"b": t["a"]}]
    )
    ensemble = served(
        server,
        {"either": model("either", ("a", "c?")), "need": model("need")},
        step("need", {"a": "w?"}, {"b": "c"}),
        step("either", {"a": "x", "c?": "c"}, {"b": "y"}),
        inputs=("x", "w?"),
    )
    assert values(ask(ensemble, x=[1])) == [[1]]
    assert [request.model_name for request in server.seen] == ["either"]
    assert values(ask(ensemble, x=[1], **{"w?": [5]})) == [[6]]


def test_only_the_steps_run_that_the_requested_outputs_need():
    server = FunctionServer(
        double=lambda t: [{"b": t["a"] * 2}],
        increase=lambda t: [{"b": t["a"] + 1}],
        other=lambda t: [{"b": t["a"] - 1}],
    )
    ensemble = served(
        server,
        {name: model(name) for name in ("double", "increase", "other")},
        step("increase", {"a": "d"}, {"b": "y"}),
        step("double", {"a": "x"}, {"b": "d"}),
        step("other", {"a": "x"}, {"b": "z"}),
        outputs=("y", "z"),
    )
    assert values(ask(ensemble, ("y",), x=[3])) == [[7]]
    assert sorted(request.model_name for request in server.seen) == ["double", "increase"]


def test_an_output_that_no_step_made_is_left_out():
    server = FunctionServer(half=lambda t: [{"b": t["a"]}])
    ensemble = served(
        server,
        {"half": model("half", outputs=("b", "c"))},
        step("half", {"a": "x"}, {"b": "y", "c": "z"}),
        outputs=("y", "z"),
    )
    [response] = ask(ensemble, x=[1])
    assert [output.name for output in response.outputs] == ["y"]


def test_an_output_of_a_batching_step_has_the_shape_of_an_ensemble_without_batching():
    server = FunctionServer(same=lambda t: [{"b": t["a"]}])
    batching = replace(model("same"), max_batch_size=8)
    ensemble = served(server, {"same": batching}, step("same", {"a": "x"}, {"b": "y"}))
    assert values(ask(ensemble, x=[1, 2])) == [[1, 2]]
    assert server.seen[0].inputs["a"].shape == (1, 2)


@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_an_output_has_the_dims_of_the_ensemble_and_is_made_in_the_shape_of_its_reshape(max_batch_size):
    lead = (1,) if max_batch_size else ()
    server = FunctionServer(flat=lambda t: [{"b": t["a"].reshape(*lead, 4)}])
    tensor = TensorSpec(name="x", data_type="TYPE_FP32", dims=(2, 2), reshape=(4,))
    config = ModelConfig(
        name="e",
        platform="ensemble",
        inputs=(tensor,),
        outputs=(replace(tensor, name="y"),),
        ensemble_steps=(step("flat", {"a": "x"}, {"b": "y"}),),
        max_batch_size=max_batch_size,
    )
    flat = replace(model("flat"), max_batch_size=max_batch_size)
    statistics = ModelStatistics()
    graph = Ensemble(config, server=server, config_of=lambda _: flat, statistics=statistics)
    ensemble = ModelVersion(graph, config=config, version=1, statistics=statistics)
    [response] = ask(ensemble, x=np.ones((*lead, 2, 2), np.float32))
    assert response.output("y").shape == (*lead, 2, 2)
    assert server.seen[0].inputs["a"].shape == (*lead, 4)


def test_a_missing_output_is_an_error():
    server = FunctionServer(need=lambda t: [{"b": t["a"]}])
    ensemble = served(
        server,
        {"need": model("need")},
        step("need", {"a": "w?"}, {"b": "y"}),
        inputs=("x", "w?"),
    )
    [response] = ask(ensemble, x=[1])
    assert "unexpected deadlock, at least one output is not set" in response.error.message


def test_a_rejected_step_fails_the_request_once():
    server = FunctionServer(increase=lambda t: [{"b": t["a"] + 1}])
    ensemble = served(
        server,
        {"increase": model("increase"), "nobody": model("nobody")},
        step("increase", {"a": "x"}, {"b": "m"}),
        step("nobody", {"a": "m"}, {"b": "y"}),
    )
    [response] = ask(ensemble, x=[1])
    assert response.error.message == "in ensemble 'e', there is none"


@pytest.mark.parametrize(("ensemble_dims", "model_batches"), [((2,), False), ((2,), True)])
def test_a_batch_dimension_of_one_is_added_where_only_the_model_batches(ensemble_dims, model_batches):
    server = FunctionServer(increase=lambda t: [{"b": t["a"] + 1}])
    config = ModelConfig(
        name="increase", inputs=(spec("a"),), outputs=(spec("b"),), max_batch_size=8 if model_batches else 0
    )
    ensemble = served(server, {"increase": config}, step("increase", {"a": "x"}, {"b": "y"}))
    ask(ensemble, x=[1, 2])
    assert server.seen[0].inputs["a"].shape == ((1, 2) if model_batches else (2,))


class Limited:
    """The steps "one" and "two", one after the other and with a limit, over a server that holds requests."""

    def __init__(self, *, limit: int, decoupled: bool = False) -> None:
        self.server = HeldServer()
        self.ensemble = served(
            self.server,
            {"one": model("one", decoupled=decoupled), "two": model("two")},
            step("one", {"a": "x"}, {"b": "m"}),
            step("two", {"a": "m"}, {"b": "y"}),
            limit=limit,
        )

    def ask(self, number: float = 0) -> tuple[Inference, list[InferenceResponse]]:
        """Submit a request; return it, and the list of its responses."""
        arrived: list[InferenceResponse] = []
        asked = inference_of(lambda response, _: arrived.append(response), x=[number])
        self.ensemble.submit(asked)
        return asked, arrived

    def at(self, name: str) -> list[Inference]:
        """The running requests at the model of a step."""
        return [part for part in self.server.held.get(name, []) if not part.ended]


def answer(part: Inference, number: float, *, final: bool = True) -> None:
    part.send(_response({"b": np.asarray([number], np.float32)}), final=final)


def test_a_step_has_no_more_requests_at_its_model_than_the_limit():
    limited = Limited(limit=2)
    arrived = [limited.ask(number)[1] for number in range(5)]
    for number in range(5):
        first, *others = limited.at("one")
        assert len(others) == min(1, 4 - number)
        answer(first, number)
        answer(limited.at("two")[0], number)
    assert [values(responses) for responses in arrived] == [[[number]] for number in range(5)]


def test_a_request_leaves_its_step_when_its_later_requests_are_submitted():
    limited = Limited(limit=1)
    for number in range(4):
        limited.ask(number)
    answer(limited.at("one")[0], 0)
    answer(limited.at("one")[0], 1)     # now "two" has one, and another waits
    assert (len(limited.at("one")), len(limited.at("two"))) == (0, 1)
    answer(limited.at("two")[0], 0)
    assert (len(limited.at("one")), len(limited.at("two"))) == (1, 1)


def test_the_responses_of_a_decoupled_step_are_passed_on_in_order():
    limited = Limited(limit=2, decoupled=True)
    _, arrived = limited.ask()
    (producer,) = limited.at("one")
    for number in range(5):
        answer(producer, number, final=False)
    producer.send(None, final=True)
    assert len(producer.backlog.waiting) == 3
    while running := limited.at("two"):
        assert len(running) <= 2
        answer(running[0], running[0].inputs["a"].array[0])
    assert values(arrived) == [[0], [1], [2], [3], [4]]
    assert not producer.backlog.waiting


def test_a_blocked_sender_is_called_back_when_a_place_is_free():
    limited, calls = Limited(limit=1, decoupled=True), []
    limited.ask()
    (producer,) = limited.at("one")
    answer(producer, 0, final=False)
    producer.backlog.when_clear(lambda: calls.append("room"))
    answer(producer, 1, final=False)
    producer.backlog.when_clear(lambda: calls.append("room again"))
    assert calls == ["room"]
    answer(limited.at("two")[0], 0)
    assert calls == ["room", "room again"]


def test_a_request_cancelled_in_the_queue_leaves_it():
    limited = Limited(limit=1)
    (first, _), (second, arrived) = limited.ask(), limited.ask()
    second.cancel()
    assert [response.error.status for response in arrived] == [Status.CANCELLED]
    answer(limited.at("one")[0], 0)
    assert limited.at("one") == []
    assert not first.ended


def test_an_error_unblocks_senders_and_frees_places():
    limited = Limited(limit=1, decoupled=True)
    _, arrived = limited.ask(1)
    limited.ask(2)
    (producer,) = limited.at("one")
    for number in range(2000):          # a model that cannot be held up
        answer(producer, number, final=False)
    limited.at("two")[0].fail(InferenceError("no more"))
    assert [response.error.message for response in arrived] == ["in ensemble 'e', no more"]
    assert producer.cancelled
    assert not producer.backlog.waiting
    producer.fail_cancelled()
    assert [part.inputs["a"].array.tolist() for part in limited.at("one")] == [[2]]


def test_unloading_an_ensemble_fails_its_queued_requests():
    limited = Limited(limit=1, decoupled=True)
    _, arrived = limited.ask()
    (producer,) = limited.at("one")
    answer(producer, 0, final=False)
    answer(producer, 1, final=False)
    limited.ensemble.close(timeout_s=0)
    assert "was unloaded" in arrived[0].error.message
    assert not producer.backlog.waiting


def test_a_queued_request_that_is_rejected_frees_its_place():
    limited = Limited(limit=1)
    arrived = [limited.ask(number)[1] for number in range(2000)][1:]
    first = limited.at("one")[0]

    def reject(inference: Inference) -> None:
        raise InferenceError("no more", status=Status.UNAVAILABLE)

    limited.server.takers = {"one": reject, "two": reject}
    answer(first, 0)
    assert {response.error.message for [response] in arrived} == {"in ensemble 'e', no more"}


def test_a_nested_ensemble_blocks_its_own_steps():
    server = HeldServer()
    configs = {name: model(name, decoupled=name != "two") for name in ("inner", "one", "two")}
    inner = served(server, configs, step("one", {"a": "a"}, {"b": "b"}), inputs=("a",), outputs=("b",))
    server.takers["inner"] = inner.submit
    steps = (step("inner", {"a": "x"}, {"b": "m"}), step("two", {"a": "m"}, {"b": "y"}))
    outer = served(server, configs, *steps, limit=1)
    arrived: list[InferenceResponse] = []
    outer.submit(inference_of(lambda response, _: arrived.append(response), x=[0]))
    (producer,) = server.held["one"]
    answer(producer, 0, final=False)
    assert not producer.backlog.waiting
    answer(producer, 1, final=False)
    assert producer.backlog.waiting
    answer(server.held["two"][0], 0)
    assert not producer.backlog.waiting


def test_an_immediate_answer_frees_its_place():
    limited = Limited(limit=1)
    arrived = [limited.ask()[1] for _ in range(2000)]
    first = limited.at("one")[0]
    limited.server.takers = dict.fromkeys(("one", "two"), lambda part: answer(part, 7))
    answer(first, 7)
    assert all(values(responses) == [[7]] for responses in arrived)


def test_a_queued_request_knows_its_blockers():
    class MovingBacklog(Backlog):
        """Clears as soon as it has been read, as another thread may clear it."""

        @property
        def waiting(self):
            waiting = super().waiting
            self.lift()
            return waiting

    limited = Limited(limit=1)
    for number in range(2):
        limited.ask(number)
    answer(limited.at("one")[0], 0)
    (second,) = limited.at("one")
    answer(second, 1)       # what has come of it waits for "two"
    (waiting,) = second.backlog.waiting
    third, _ = limited.ask(2)
    second.backlog = MovingBacklog()
    second.backlog.add(waiting)
    assert third.parts[0].blocked_by() == [waiting]
    assert third.parts[0].blocked_by() == [second]


@pytest.mark.parametrize("limit", [0, 1])
def test_a_request_that_a_model_cannot_take_fails_alone(limit):
    def reject_one(part):
        if part.inputs["a"].array[0] == 1:
            raise OSError("no room")
        limited.server.held["two"].append(part)

    limited = Limited(limit=limit)
    limited.server.held["two"], limited.server.takers["two"] = [], reject_one
    arrived = [limited.ask(number)[1] for number in range(3)]
    while running := limited.at("one") + limited.at("two"):
        answer(running[0], running[0].inputs["a"].array[0])
    (failed,) = arrived[1]
    assert failed.error.message == "in ensemble 'e', OSError: no room"
    assert [values(arrived[0]), values(arrived[2])] == [[[0]], [[2]]]
