"""No field of the schema is ignored in silence."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import text_format

from genserve.config.honoured import unhonoured_fields
from genserve.config.schema import new_model_config


def unhonoured(text: str) -> list[str]:
    fields = unhonoured_fields(text_format.Parse(text, new_model_config()))
    return [f"{field.severity.value} {field.path}: {field.message}" for field in fields]


@pytest.mark.parametrize(
    ("text", "golden"),
    [
        ("dynamic_batching { }",
         "warning dynamic_batching: dynamic_batching is not honoured: the logits stage batches by itself, at "
         "each step"),
        ("instance_group { count: 4 }",
         "warning instance_group: instance_group is not honoured: each model has one instance, on the CPU"),
        ("instance_group { kind: KIND_GPU }",
         "warning instance_group: instance_group is not honoured: each model has one instance, on the CPU"),
        ("response_cache { enable: true }",
         "warning response_cache: response_cache is not honoured: every answer is computed anew"),
        ('model_warmup { name: "w" }',
         "warning model_warmup: model_warmup is not honoured: the first request is the first to run"),
        ("optimization { }",
         "warning optimization: optimization is not honoured: ONNX Runtime's own optimizations hold"),
        ('input { name: "a" } input { reshape { shape: [ 1 ] } }',
         "error input[1].reshape: reshape is not honoured: the model would get another shape"),
        ("sequence_batching { direct { } }",
         "warning sequence_batching[0].direct: direct is not honoured: a sequence takes any free slot, the "
         "oldest first"),
        ('sequence_batching { control_input { name: "START" } }',
         "error sequence_batching[0].control_input: control_input is not honoured: the model would not be "
         "told where a sequence begins and ends"),
        ("sequence_batching { oldest { max_queue_delay_microseconds: 5 } }",
         "warning sequence_batching[0].oldest[0].max_queue_delay_microseconds: max_queue_delay_microseconds "
         "is not honoured: a step never waits"),
        ('ensemble_scheduling { step { } step { model_namespace: "n" } }',
         "error ensemble_scheduling[0].step[1].model_namespace: model_namespace is not honoured: models are "
         "found by name alone"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_honoured_is_told_by_name_with_what_happens_instead(
    text: str, golden: str
) -> None:
    assert unhonoured(text) == [golden]


@pytest.mark.parametrize(
    "text",
    [
        "instance_group { count: 1 kind: KIND_CPU }",
        "response_cache { enable: false }",
        "version_policy { specific { versions: 1 } }",
        'parameters { key: "a" value { string_value: "b" } }',
    ],
)
def test_a_field_that_says_what_happens_anyway_or_that_rules_look_into_is_honoured(text: str) -> None:
    assert unhonoured(text) == []


def test_each_field_at_the_top_of_the_schema_is_honoured_or_told() -> None:
    honoured = {
        "name", "platform", "backend", "version_policy", "max_batch_size", "input", "output",
        "sequence_batching", "ensemble_scheduling", "default_model_filename", "parameters",
        "model_transaction_policy",
    }  # fmt: skip
    fields = new_model_config().DESCRIPTOR.fields
    for field in fields:
        proto = new_model_config()
        write(proto, field)
        told = [line.split()[1] for line in unhonoured(text_format.MessageToString(proto))]
        assert told == ([] if field.name in honoured else [f"{field.name}:"])


def write(proto: Any, field: Any) -> None:
    """Give a field some value that is not its default."""
    value = getattr(proto, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if field.message_type.fields_by_name["value"].message_type is None:
            value["a"] = "b"
        else:
            value["a"].SetInParent()
    elif field.name == "instance_group":
        value.add(count=2)
    elif field.name == "response_cache":
        value.enable = True
    elif hasattr(value, "add"):
        value.add()
    elif field.message_type is not None:
        value.SetInParent()
    else:
        setattr(proto, field.name, 1 if isinstance(value, int) else "a")
