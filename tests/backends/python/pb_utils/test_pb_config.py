from __future__ import annotations

import json

import pytest

from genserve.backends.python.pb_utils import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)

X = {"name": "X", "data_type": "TYPE_FP32", "dims": [4]}


def config(**fields):
    return ModelConfig(json.dumps({"name": "m", "max_batch_size": 8, "input": [], "output": []} | fields))


def test_inputs_and_outputs_are_found_by_name():
    parsed = config(input=[X]).as_dict()
    assert get_input_config_by_name(parsed, "X") == X
    assert get_input_config_by_name(parsed, "Y") is None
    assert get_output_config_by_name(parsed, "X") is None
    assert get_output_config_by_name({}, "X") is None


@pytest.mark.parametrize(
    ("fields", "decoupled"),
    [({}, False), ({"model_transaction_policy": {"decoupled": True}}, True)],
)
def test_the_transaction_policy_is_read(fields, decoupled):
    assert using_decoupled_model_transaction_policy(config(**fields).as_dict()) is decoupled


def test_missing_tensors_are_added():
    made = config(max_batch_size=0)
    made.set_max_batch_size(4)
    made.set_dynamic_batching()
    made.add_input({**X, "optional": True})
    made.add_output(X)
    made.set_model_transaction_policy({"decoupled": True})
    assert made.as_dict() == {
        "name": "m",
        "max_batch_size": 4,
        "dynamic_batching": {},
        "input": [{**X, "optional": True}],
        "output": [X],
        "model_transaction_policy": {"decoupled": True},
    }


def test_fields_missing_in_config_pbtxt_are_filled_in():
    made = config(input=[{"name": "X", "data_type": "TYPE_INVALID", "dims": [], "format": "FORMAT_NONE"}])
    made.add_input(X)
    assert made.as_dict()["input"] == [{**X, "format": "FORMAT_NONE"}]


def test_a_smaller_batch_of_config_pbtxt_is_raised():
    made = config()
    made.set_max_batch_size(16)
    assert made.as_dict()["max_batch_size"] == 16


def test_an_existing_scheduler_is_kept():
    made = config(dynamic_batching={"max_queue_delay_microseconds": 5})
    made.set_dynamic_batching()
    assert made.as_dict()["dynamic_batching"] == {"max_queue_delay_microseconds": 5}


IN = "in auto-complete-config function for model 'm'"


@pytest.mark.parametrize(
    ("fields", "complete", "text"),
    [
        (
            {},
            lambda made: made.set_max_batch_size(4),
            "configuration specified max_batch_size 8, but in auto-complete-config function for model 'm' "
            "specified max_batch_size 4",
        ),
        (
            {"sequence_batching": {}},
            lambda made: made.set_dynamic_batching(),
            "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config "
            "function for model 'm' tries to set scheduling_choice as 'dynamic_batching'",
        ),
        (
            {},
            lambda made: made.add_input({**X, "reshape": []}),
            f"input 'X' {IN} contains property other than 'name', 'data_type', 'dims' and 'optional'.",
        ),
        (
            {},
            lambda made: made.add_output({**X, "optional": True}),
            f"output 'X' {IN} contains property other than 'name', 'data_type' and 'dims'.",
        ),
        ({}, lambda made: made.add_input({}), f"input {IN} is missing 'name' property."),
        ({}, lambda made: made.add_input({"name": "X"}), f"input 'X' {IN} is missing 'data_type' property."),
        (
            {},
            lambda made: made.add_output({"name": "X", "data_type": "TYPE_FP32"}),
            f"output 'X' {IN} is missing 'dims' property.",
        ),
        (
            {"input": [X]},
            lambda made: made.add_input({**X, "data_type": "TYPE_INT8"}),
            "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'X', "
            "model provides TYPE_INT8",
        ),
        (
            {"output": [X]},
            lambda made: made.add_output({**X, "dims": [5]}),
            "model 'm', tensor 'X': the model expects dims [5] but the model configuration specifies dims "
            "[4]",
        ),
        (
            {"input": [{**X, "optional": False}]},
            lambda made: made.add_input({**X, "optional": True}),
            "model 'm', tensor 'X': the model expects optional True but the model configuration specifies "
            "optional False",
        ),
        (
            {},
            lambda made: made.set_model_transaction_policy({"other": 1}),
            f"model transaction property {IN} contains property other than 'decoupled'.",
        ),
        (
            {"model_transaction_policy": {"decoupled": True}},
            lambda made: made.set_model_transaction_policy({"decoupled": False}),
            "trying to change decoupled property in auto-complete-config for model 'm', which is already set "
            "to 'True'.",
        ),
    ],
)
def test_a_contradiction_is_an_error_in_tritons_words(fields, complete, text):
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the whole text is compared
        complete(config(**fields))
    assert str(raised.value) == text
