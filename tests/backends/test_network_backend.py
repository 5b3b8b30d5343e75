from __future__ import annotations

import numpy as np
import pytest

from genserve.backends.network_backend import BatchRunner
from genserve.errors import InferenceError
from genserve.tensor import DataType, Tensor
from tests.backends.inferences import ask, config_of


def spec(kind, name, *, data_type="TYPE_FP32", dims="-1", more=""):
    return f'{kind} {{ name: "{name}" data_type: {data_type} dims: [ {dims} ] {more} }}\n'


def run_batch(config, *asked, outputs):
    """Execute a batch; return the inputs of the network, and the responses."""
    seen = {}

    def run(inputs, names):
        seen.update({name: tensor.array for name, tensor in inputs.items()})
        made = outputs(inputs) if callable(outputs) else outputs
        return {name: Tensor(name, made[name]) for name in names}

    BatchRunner(config).execute([one.inference for one in asked], run=run)
    return seen, [one.outputs() for one in asked]


def rows(*values):
    return np.array(values, dtype=np.float32).reshape(len(values), -1)


def test_rows_are_joined_in_request_order_and_split_again():
    config = config_of("max_batch_size: 8 " + spec("input", "x") + spec("output", "y"))
    asked = (ask({"x": rows(1, 2)}, batch_size=2), ask({"x": rows(3)}))
    seen, answers = run_batch(config, *asked, outputs=lambda inputs: {"y": inputs["x"].array * 10})
    assert seen["x"].tolist() == [[1], [2], [3]]
    assert [answer["y"].tolist() for answer in answers] == [[[10], [20]], [[30]]]


def test_strings_are_joined():
    config = config_of(
        "max_batch_size: 8 "
        + spec("input", "x", data_type="TYPE_STRING")
        + spec("output", "y", data_type="TYPE_STRING")
    )
    texts = [np.array([[text]], dtype=object) for text in (b"a", b"b")]
    _, answers = run_batch(
        config, *(ask({"x": text}) for text in texts), outputs=lambda inputs: {"y": inputs["x"].array}
    )
    assert [answer["y"].tolist() for answer in answers] == [[[b"a"]], [[b"b"]]]


def test_extra_rows_of_an_output_are_ignored():
    config = config_of("max_batch_size: 8 " + spec("input", "x") + spec("output", "y"))
    _, [answer] = run_batch(config, ask({"x": rows(1)}), outputs={"y": rows(5, 6)})
    assert answer["y"].tolist() == [[5]]


def test_an_optional_input_that_no_request_has_is_left_out():
    config = config_of(
        "max_batch_size: 8 " + spec("input", "x") + spec("input", "o", more="optional: true")
        + spec("output", "y")
    )
    seen, _ = run_batch(config, ask({"x": rows(1)}), ask({"x": rows(2)}), outputs={"y": rows(0, 0)})
    assert set(seen) == {"x"}


KINDS = {
    "BATCH_ELEMENT_COUNT": [3, 2],
    "BATCH_ACCUMULATED_ELEMENT_COUNT": [3, 5],
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, 3, 5],
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": [0, 0, 0],
    "BATCH_ITEM_SHAPE": [[3], [2]],
    "BATCH_ITEM_SHAPE_FLATTEN": [3, 2],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data_type", ["TYPE_INT32", "TYPE_FP32"])
def test_ragged_inputs_are_flat_with_batch_inputs(kind, data_type):
    config = config_of(
        "max_batch_size: 8 "
        + spec("input", "x", more="allow_ragged_batch: true")
        + spec("output", "y")
        + f'batch_input {{ kind: {kind} target_name: "d" data_type: {data_type} source_input: "x" }}'
    )
    asked = (ask({"x": rows([1, 2, 3])}), ask({"x": rows([4, 5])}))
    seen, _ = run_batch(config, *asked, outputs={"y": rows(0, 0)})
    assert seen["x"].tolist() == [1, 2, 3, 4, 5]
    assert seen["d"].tolist() == KINDS[kind]
    assert DataType.of_numpy(seen["d"].dtype).config_name == data_type


def test_item_shapes_are_repeated_for_each_row():
    config = config_of(
        "max_batch_size: 8 "
        + spec("input", "x", dims="-1, -1", more="allow_ragged_batch: true")
        + spec("output", "y")
        + 'batch_input { kind: BATCH_ITEM_SHAPE target_name: "d" data_type: TYPE_INT32 source_input: "x" }'
    )
    asked = (
        ask({"x": np.zeros((2, 2, 1), np.float32)}, batch_size=2),
        ask({"x": np.zeros((1, 1, 2), np.float32)}),
    )
    seen, _ = run_batch(config, *asked, outputs={"y": rows(0, 0, 0)})
    assert seen["d"].tolist() == [[2, 1], [2, 1], [1, 2]]


def test_a_flat_output_is_split_by_the_shapes_of_the_input():
    config = config_of(
        "max_batch_size: 8 "
        + spec("input", "x", more="allow_ragged_batch: true")
        + spec("output", "y")
        + 'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }'
    )
    asked = (ask({"x": rows([1, 2, 3])}), ask({"x": rows([4, 5], [6, 7])}, batch_size=2))
    _, answers = run_batch(config, *asked, outputs=lambda inputs: {"y": inputs["x"].array})
    assert [answer["y"].tolist() for answer in answers] == [[[1, 2, 3]], [[4, 5], [6, 7]]]


STATEFUL = (
    "max_batch_size: 8 "
    + spec("input", "x", dims="1")
    + spec("output", "y", dims="1")
    + """sequence_batching { state { input_name: "before" output_name: "after" data_type: TYPE_FP32
    dims: [ 1 ] } }"""
)


def state(value):
    return {"before": Tensor("before", rows(value))}


def test_a_state_is_an_input_and_its_new_value_is_kept_per_sequence():
    asked = [ask({"x": rows(1)}, states=state(10)), ask({"x": rows(2)}, states=state(20))]

    def add(inputs):
        return {"y": inputs["x"].array, "after": inputs["before"].array + inputs["x"].array}

    seen, answers = run_batch(config_of(STATEFUL), *asked, outputs=add)
    assert seen["before"].tolist() == [[10], [20]]
    assert [one.inference.states["before"].array.tolist() for one in asked] == [[[11]], [[22]]]
    assert [one.inference.states["before"].name for one in asked] == ["before", "before"]
    assert [set(answer) for answer in answers] == [{"y"}, {"y"}]


def test_a_state_is_kept_though_the_request_asks_for_another_output():
    asked = ask({"x": rows(1)}, states=state(1), outputs=["y"])
    run_batch(config_of(STATEFUL), asked, outputs={"y": rows(0), "after": rows(7)})
    assert asked.inference.states["before"].array.tolist() == [[7]]


def test_a_state_that_is_also_an_output_is_returned():
    config = config_of(STATEFUL + spec("output", "after", dims="1"))
    _, [answer] = run_batch(
        config, ask({"x": rows(1)}, states=state(1)), outputs={"y": rows(0), "after": rows(7)}
    )
    assert answer["after"].tolist() == [[7]]


def test_a_batch_of_sequences_that_the_network_rejects_is_not_run_again():
    runs = []

    def reject(inputs):
        runs.append(inputs["x"].array.tolist())
        raise InferenceError("index out of range")

    asked = [ask({"x": rows(1)}, states=state(10)), ask({"x": rows(2)}, states=state(20))]
    with pytest.raises(InferenceError, match="index out of range"):
        run_batch(config_of(STATEFUL), *asked, outputs=reject)
    assert runs == [[[1], [2]]], "a network with a state of each row must not see a row in another place"
    assert [one.responses for one in asked] == [[], []]


def test_a_batch_with_an_invalid_output_sends_no_response():
    config = config_of("max_batch_size: 8 " + spec("input", "x") + spec("output", "y"))
    asked = [ask({"x": rows(1)}), ask({"x": rows(2)})]
    with pytest.raises(InferenceError, match="model provides TYPE_FP64"):
        run_batch(config, *asked, outputs={"y": np.zeros((2, 1))})
    assert [one.responses for one in asked] == [[], []]
