"""No field of the schema is ignored in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from genserve.config.schema import new_model_config
from genserve.config.supported_fields import unsupported_fields

OF_NO_USE_WITHOUT_TENSORRT = ("cuda", "gather_kernel_buffer_threshold", "priority")


def unhonoured(text: str) -> list[str]:
    fields = unsupported_fields(text_format.Parse(text, new_model_config()))
    return [f"{field.severity.value} {field.path}: {field.message}" for field in fields]


@pytest.mark.parametrize(
    ("text", "golden"),
    [
        ('runtime: "a.so"', "warning runtime: runtime is not honoured: the backend's own runtime is used"),
        ('cc_model_filenames { key: "7.5" value: "x" }',
         "warning cc_model_filenames: cc_model_filenames is not honoured: `default_model_filename` is loaded "
         "on every device"),
        ('model_repository_agents { agents { name: "checksum" } }',
         "error model_repository_agents: model_repository_agents is not honoured: the agents would not see "
         "the files"),
        ('input { name: "a" } input { format: FORMAT_NCHW }',
         "warning input[1].format: format is not honoured: dimensions are taken in the order of `dims`"),
        ("optimization { cuda { graphs: true } }",
         "warning optimization[0].cuda: cuda is not honoured: no CUDA graphs are captured"),
        ("instance_group { } instance_group { passive: true }",
         "warning instance_group[1].passive: passive is not honoured: the instances take requests like all "
         "others"),
        ('sequence_batching { state { use_growable_memory: true } }',
         "warning sequence_batching[0].state[0].use_growable_memory: use_growable_memory is not honoured: "
         "memory is reserved at load, and taken as tokens come"),
        ('ensemble_scheduling { step { } step { model_namespace: "n" } }',
         "warning ensemble_scheduling[0].step[1].model_namespace: model_namespace is not honoured: models "
         "are found by name alone; Triton, too, writes its own value over it"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_honoured_is_told_by_name_with_what_happens_instead(
    text: str, golden: str
) -> None:
    assert unhonoured(text) == [golden]


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parent / "recorded").glob("*.pbtxt")), ids=lambda file: file.stem
)
def test_what_people_write_is_honoured(file: Path) -> None:
    told = [line.split()[1] for line in unhonoured(file.read_text())]
    fields = ["cc_model_filenames", *(f"optimization[0].{name}" for name in OF_NO_USE_WITHOUT_TENSORRT)]
    assert sorted(told) == (sorted(f"{field}:" for field in fields) if file.stem == "decoupled" else [])


def test_each_field_at_the_top_of_the_schema_is_honoured_or_told() -> None:
    not_honoured = {
        "runtime", "cc_model_filenames", "model_operations", "model_repository_agents",
    }  # fmt: skip
    for field in new_model_config().DESCRIPTOR.fields:
        message = new_model_config()
        write(message, field)
        told = [line.split()[1] for line in unhonoured(text_format.MessageToString(message))]
        assert told == ([f"{field.name}:"] if field.name in not_honoured else [])


def write(proto: Any, field: Any) -> None:
    """Give a field some value that is not its default."""
    value = getattr(proto, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if field.message_type.fields_by_name["value"].message_type is None:
            value["a"] = "b"
        else:
            value["a"].SetInParent()
    elif hasattr(value, "add"):
        value.add()
    elif field.message_type is not None:
        value.SetInParent()
    else:
        setattr(proto, field.name, 1 if isinstance(value, int) else "a")
