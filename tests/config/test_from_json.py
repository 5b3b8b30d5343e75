"""Configs in JSON: what a real Triton (2.51) took and refused as an override."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from genserve.config.config_json import config_json, read_config_json
from genserve.config.schema import new_model_config
from genserve.errors import RepositoryError
from tests.config.test_to_json import NEWER, RECORDED, recorded_json


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
def test_what_triton_refuses_is_refused_with_a_remedy(text):
    with pytest.raises(RepositoryError, match=r"^Invalid config override: ") as raised:
        read_config_json(text, name="m")
    assert "/v2/models/m/config" in raised.value.remedy


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_real_triton_shows_can_be_loaded(name):
    shown = recorded_json(name)
    assert config_json(read_config_json(shown, name=name)).replace(NEWER, "") == shown


def test_what_is_shown_can_be_loaded_again():
    message = text_format.Parse(
        'max_batch_size: 4 input { name: "a" data_type: TYPE_FP32 dims: [ -1, 3 ] } '
        "dynamic_batching { max_queue_delay_microseconds: 5 priority_queue_policy { key: 2 value { } } } "
        'model_warmup { inputs { key: "a" value { dims: 3 zero_data: true } } }',
        new_model_config(),
    )
    assert read_config_json(config_json(message), name="m") == message
