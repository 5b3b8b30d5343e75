"""Configs as JSON: read as leniently as Triton reads them, written as Triton writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from genserve.config.config_json import config_json, read_config_json
from genserve.config.normalise import normalise
from genserve.config.schema import new_model_config
from genserve.errors import RepositoryError

FOLDER = Path(__file__).parent / "recorded"
RECORDED = sorted(file.stem for file in FOLDER.glob("*.json"))
NEWER = ',"max_inflight_requests":0'  # a field that Triton 2.51 did not have


def recorded_json(name: str) -> str:
    return (FOLDER / f"{name}.json").read_text().rstrip("\n")


@pytest.mark.parametrize(
    ("text", "golden"),
    [
        ('{"maxBatchSize":3}', "max_batch_size: 3"),
        ("{max_batch_size:4}", "max_batch_size: 4"),
        ('{"max_batch_size":5,}', "max_batch_size: 5"),
        ("{'max_batch_size':7, 'name': 'it\\'s \"m\"'}", 'max_batch_size: 7 name: "it\'s \\"m\\""'),
        ('{"max_batch_size":"8"}', "max_batch_size: 8"),
        ('{"max_batch_size":8.0}', "max_batch_size: 8"),
        ('{"max_batch_size":null}', ""),
        ('{"instance_group":[{"kind":"kind_model"},]}', "instance_group { kind: KIND_MODEL }"),
        ('{"instance_group":{"kind":2}}', "instance_group { kind: KIND_CPU }"),
        ('{"sequence_batching":{direct:{},"control_input":[]}}', "sequence_batching { direct { } }"),
        ('{"sequence_batching":{"generative_sequence":true}}',
         "sequence_batching { iterative_sequence: true }"),
        ('{"parameters":{"a":{"string_value":"x: y,"}}}',
         'parameters { key: "a" value { string_value: "x: y," } }'),
        ('{"response_cache":{"enable":"true"}}', "response_cache { enable: true }"),
        ('{"dynamic_batching":{"max_queue_delay_microseconds":"5"}}',
         "dynamic_batching { max_queue_delay_microseconds: 5 }"),
        ("{}", ""),
    ],
)  # fmt: skip
def test_a_config_is_read_as_leniently_as_triton_does(text, golden):
    assert read_config_json(text, name="m") == text_format.Parse(golden, new_model_config())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"max_batch_size":3}}',
        '{"max_batch_size":3 "backend":"a"}',
        '{"backend":"python",{},"max_batch_size":6}',
        '{"backend":"python", /*c*/ "max_batch_size":3}',
        '{"max_batch_size":true}',
        '{"max_batch_size":007}',
        '{"instance_group":[{},,{}]}',
        '{"nope":1}',
        '{"parameters":{"a":"x"}}',
        '{"parameters":"x"}',
        '{"input":[3]}',
    ],
)
def test_json_that_triton_rejects_is_rejected_with_a_remedy(text):
    with pytest.raises(RepositoryError, match=r"^Invalid config override: ") as raised:
        read_config_json(text, name="m")
    assert "/v2/models/m/config" in raised.value.remedy


@pytest.mark.parametrize("name", RECORDED)
def test_the_json_of_a_real_triton_can_be_loaded(name):
    shown = recorded_json(name)
    assert config_json(read_config_json(shown, name=name)).replace(NEWER, "") == shown


def test_written_json_can_be_loaded_again():
    message = text_format.Parse(
        'max_batch_size: 4 input { name: "a" data_type: TYPE_FP32 dims: [ -1, 3 ] } '
        "dynamic_batching { max_queue_delay_microseconds: 5 priority_queue_policy { key: 2 value { } } } "
        'model_warmup { inputs { key: "a" value { dims: 3 zero_data: true } } }',
        new_model_config(),
    )
    assert read_config_json(config_json(message), name="m") == message


def normalised(name: str, *, root: Path):
    """The config of a recorded model, with the defaults of a machine without a GPU."""
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").touch()
    message = text_format.Parse((FOLDER / f"{name}.pbtxt").read_text(), new_model_config())
    assert normalise(message, model_folder=folder) == ()
    return message


@pytest.mark.parametrize("name", RECORDED)
def test_a_config_is_shown_character_by_character_as_triton_shows_it(name: str, tmp_path: Path) -> None:
    message = normalised(name, root=tmp_path)
    if name == "chain":
        message.model_transaction_policy.decoupled = True  # as one of its steps is
    assert config_json(message).replace(NEWER, "") == recorded_json(name)


def test_maps_are_sorted() -> None:
    message = new_model_config()
    for key in "cab":
        message.metric_tags[key] = key.upper()
    assert '"metric_tags":{"a":"A","b":"B","c":"C"}' in config_json(message)


def test_numbers_have_as_few_digits_as_possible() -> None:
    message = new_model_config()
    control = message.sequence_batching.control_input.add().control.add()
    control.fp32_false_true.extend([0.1, 3e-07])
    message.model_metrics.metric_control.add().histogram_options.buckets.extend([0.1, 5.0])
    text = config_json(message)
    assert '"fp32_false_true":[0.1,3e-07]' in text
    assert '"buckets":[0.1,5]' in text
