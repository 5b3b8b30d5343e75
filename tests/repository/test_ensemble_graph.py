"""The ensemble's graph, over a door of small functions that answer on a thread of their own."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import numpy as np
import pytest

from genserve.config.model_config import EnsembleStep, ModelConfig, TensorSpec
from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceRequest, InferenceResponse, OnResponse
from genserve.repository.ensemble import Ensemble, _Flow
from genserve.repository.served import Served
from genserve.statistics import ModelStatistics
from genserve.tensor import Tensor

Function = Callable[[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]


class FunctionDoor:
    """A door to functions: from arrays to the responses of a model."""

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


class HeldDoor:
    """A door to models that answer when the test does it for them."""

    def __init__(self) -> None:
        self.held: dict[str, list[Inference]] = {}

    def submit(self, inference: Inference) -> None:
        self.held.setdefault(inference.request.model_name, []).append(inference)


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
    door: FunctionDoor, models: dict[str, ModelConfig], *steps: EnsembleStep, inputs=("x",), outputs=("y",)
) -> Served:
    config = ModelConfig(
        name="e",
        platform="ensemble",
        inputs=tuple(spec(name, optional=name.endswith("?")) for name in inputs),
        outputs=tuple(spec(name) for name in outputs),
        ensemble_steps=steps,
    )
    statistics = ModelStatistics()
    graph = Ensemble(
        config, door=door, config_of=lambda step: models[step.model_name], statistics=statistics
    )
    return Served(graph, config=config, version=1, statistics=statistics)


def inference_of(on_response: OnResponse, **arrays: np.ndarray) -> Inference:
    request = InferenceRequest(
        model_name="e",
        id="7",
        inputs={name: Tensor(name, np.asarray(array, np.float32)) for name, array in arrays.items()},
    )
    return Inference(request=request, on_response=on_response)


def ask(model: Served, **arrays: np.ndarray) -> list[InferenceResponse | None]:
    """All that comes, in order; `None` stands for an end that came alone."""
    arrived: queue.SimpleQueue[tuple[InferenceResponse | None, bool]] = queue.SimpleQueue()
    model.submit(inference_of(lambda response, final: arrived.put((response, final)), **arrays))
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
    door = FunctionDoor(
        double=lambda t: [{"b": t["a"] * 2}], increase=lambda t: [{"b": t["a"] + 1}]
    )
    ensemble = served(
        door,
        {"double": model("double"), "increase": model("increase")},
        step("increase", {"a": "doubled"}, {"b": "y"}),
        step("double", {"a": "x"}, {"b": "doubled"}),
    )
    [response] = ask(ensemble, x=[1, 2])
    assert values([response]) == [[3, 5]]
    assert [request.model_name for request in door.seen] == ["double", "increase"]
    assert {request.id for request in door.seen} == {"7"}
    assert ensemble.statistics.success.count == ensemble.statistics.inference_count == 1
    assert ensemble.statistics.execution_count == 1


def test_two_branches_meet_again():
    door = FunctionDoor(
        double=lambda t: [{"b": t["a"] * 2}],
        increase=lambda t: [{"b": t["a"] + 1}],
        add=lambda t: [{"s": t["p"] + t["q"]}],
    )
    ensemble = served(
        door,
        {"double": model("double"), "increase": model("increase"), "add": model("add", ("p", "q"), ("s",))},
        step("double", {"a": "x"}, {"b": "l"}),
        step("increase", {"a": "x"}, {"b": "r"}),
        step("add", {"p": "l", "q": "r"}, {"s": "y"}),
    )
    for number in range(50):
        assert values(ask(ensemble, x=[number])) == [[number * 3 + 1]]


def test_each_response_of_a_decoupled_step_goes_through_the_rest_with_the_tensors_of_its_side():
    door = FunctionDoor(
        repeat=lambda t: [{"b": t["a"] + k} for k in range(3)],
        slow=lambda t: [{"b": t["a"] * 100}],
        add=lambda t: [{"s": t["p"] + t["q"]}],
    )
    ensemble = served(
        door,
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
    door = FunctionDoor(repeat=lambda t: [], increase=lambda t: [{"b": t["a"] + 1}])
    ensemble = served(
        door,
        {"repeat": model("repeat", decoupled=True), "increase": model("increase")},
        step("repeat", {"a": "x"}, {"b": "part"}),
        step("increase", {"a": "part"}, {"b": "y"}),
    )
    assert ask(ensemble, x=[1]) == [None]


def test_what_a_response_costs_does_not_grow_with_those_on_their_way(monkeypatch):
    door = HeldDoor()
    ensemble = served(
        door,
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
        door.held["repeat"][0].send(_response({"b": np.float32([number])}), final=False)
        costs.append(len(looks))
    assert len(inference.parts) == 51
    for part in door.held["hold"]:
        looks.clear()
        part.send(_response({"b": np.float32([0])}), final=True)
        costs.append(len(looks))
    assert max(costs) < 20
    assert inference.parts == door.held["repeat"]
    door.held["repeat"][0].send(None, final=True)
    assert arrived == [False] * 50 + [True]


def test_streams_of_streams_end_with_the_last_of_them():
    door = FunctionDoor(
        repeat=lambda t: [{"b": t["a"] * 10 + k} for k in range(3)],
        increase=lambda t: [{"b": t["a"] + 1}],
    )
    ensemble = served(
        door,
        {"repeat": model("repeat", decoupled=True), "increase": model("increase")},
        step("repeat", {"a": "x"}, {"b": "part"}),
        step("repeat", {"a": "part"}, {"b": "smaller"}),
        step("increase", {"a": "smaller"}, {"b": "y"}),
    )
    for _ in range(30):
        responses = ask(ensemble, x=[0])
        assert sorted(values(responses)) == [[10 * tens + ones + 1] for tens in range(3) for ones in range(3)]


def test_no_step_begins_once_another_has_failed():
    door = HeldDoor()
    ensemble = served(
        door,
        {"fail": model("fail"), "slow": model("slow"), "last": model("last")},
        step("fail", {"a": "x"}, {"b": "z"}),
        step("slow", {"a": "x"}, {"b": "m"}),
        step("last", {"a": "m"}, {"b": "y"}),
        outputs=("y", "z"),
    )
    arrived = []
    ensemble.submit(inference_of(lambda response, final: arrived.append(response.error.message), x=[1]))
    door.held["fail"][0].fail(InferenceError("no luck"))
    door.held["slow"][0].send(_response({"b": np.float32([1])}), final=True)
    assert arrived == ["in ensemble 'e', no luck"]
    assert "last" not in door.held


def test_an_error_names_the_ensemble_and_keeps_its_code():
    def fail(tensors):
        raise InferenceError("no luck", status=Status.UNAVAILABLE)

    door = FunctionDoor(fail=fail, increase=lambda t: [{"b": t["a"] + 1}])
    ensemble = served(
        door,
        {"fail": model("fail"), "increase": model("increase")},
        step("fail", {"a": "x"}, {"b": "m"}),
        step("increase", {"a": "m"}, {"b": "y"}),
    )
    [response] = ask(ensemble, x=[1])
    assert response.error.message == "in ensemble 'e', no luck"
    assert response.error.status is Status.UNAVAILABLE
    assert ensemble.statistics.fail.count == 1


def test_an_optional_tensor_that_is_not_sent_leaves_out_what_needs_it():
    door = FunctionDoor(
        either=lambda t: [{"b": t["a"] + t.get("c?", 0)}], need=lambda t: [{"b": t["a"]}]
    )
    ensemble = served(
        door,
        {"either": model("either", ("a", "c?")), "need": model("need")},
        step("need", {"a": "w?"}, {"b": "c"}),
        step("either", {"a": "x", "c?": "c"}, {"b": "y"}),
        inputs=("x", "w?"),
    )
    assert values(ask(ensemble, x=[1])) == [[1]]
    assert [request.model_name for request in door.seen] == ["either"]
    assert values(ask(ensemble, x=[1], **{"w?": [5]})) == [[6]]


def test_an_output_that_nothing_made_is_an_error():
    door = FunctionDoor(need=lambda t: [{"b": t["a"]}])
    ensemble = served(
        door,
        {"need": model("need")},
        step("need", {"a": "w?"}, {"b": "y"}),
        inputs=("x", "w?"),
    )
    [response] = ask(ensemble, x=[1])
    assert "unexpected deadlock, at least one output is not set" in response.error.message


def test_a_step_that_is_refused_fails_the_request_once():
    door = FunctionDoor(increase=lambda t: [{"b": t["a"] + 1}])
    ensemble = served(
        door,
        {"increase": model("increase"), "nobody": model("nobody")},
        step("increase", {"a": "x"}, {"b": "m"}),
        step("nobody", {"a": "m"}, {"b": "y"}),
    )
    [response] = ask(ensemble, x=[1])
    assert response.error.message == "in ensemble 'e', there is none"


@pytest.mark.parametrize(("ensemble_dims", "model_batches"), [((2,), False), ((2,), True)])
def test_a_batch_dimension_of_one_is_added_where_only_the_model_batches(ensemble_dims, model_batches):
    door = FunctionDoor(increase=lambda t: [{"b": t["a"] + 1}])
    config = ModelConfig(
        name="increase", inputs=(spec("a"),), outputs=(spec("b"),), max_batch_size=8 if model_batches else 0
    )
    ensemble = served(door, {"increase": config}, step("increase", {"a": "x"}, {"b": "y"}))
    ask(ensemble, x=[1, 2])
    assert door.seen[0].inputs["a"].shape == ((1, 2) if model_batches else (2,))
