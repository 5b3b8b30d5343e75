"""No field of the schema is ignored silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from genserve.config.schema import new_model_config
from genserve.repository.rules.supported_fields import unsupported_fields

TENSORRT_ONLY = ("cuda", "gather_kernel_buffer_threshold", "priority")


def unsupported(text: str) -> list[str]:
    fields = unsupported_fields(text_format.Parse(text, new_model_config()))
    return [f"{field.severity.value} {field.path}: {field.message}" for field in fields]


@pytest.mark.parametrize(
    ("text", "golden"),
    [
        ('runtime: "a.so"', "warning runtime: runtime is ignored: the backend's own runtime is used"),
        ('cc_model_filenames { key: "7.5" value: "x" }',
         "warning cc_model_filenames: cc_model_filenames is ignored: `default_model_filename` is loaded "
         "on every device"),
        ('model_repository_agents { agents { name: "checksum" } }',
         "error model_repository_agents: model_repository_agents is ignored: agents do not process "
         "the files"),
        ('input { name: "a" } input { format: FORMAT_NCHW }',
         "warning input[1].format: format is ignored: dimensions are taken in the order of `dims`"),
        ("optimization { cuda { graphs: true } }",
         "warning optimization[0].cuda: cuda is ignored: no CUDA graphs are captured"),
        ("instance_group { } instance_group { passive: true }",
         "warning instance_group[1].passive: passive is ignored: the instances take requests like any "
         "other"),
        ('sequence_batching { state { use_growable_memory: true } }',
         "warning sequence_batching[0].state[0].use_growable_memory: use_growable_memory is ignored: "
         "memory is reserved at load, and used as tokens arrive"),
        ('ensemble_scheduling { step { } step { model_namespace: "n" } }',
         "warning ensemble_scheduling[0].step[1].model_namespace: model_namespace is ignored: models "
         "are found by name alone; Triton, too, overwrites it with its own value"),
    ],
)  # fmt: skip
def test_an_ignored_field_is_reported_with_what_happens_instead(
    text: str, golden: str
) -> None:
    assert unsupported(text) == [golden]


@pytest.mark.parametrize(
    "file",
    sorted((Path(__file__).parents[2] / "config" / "recorded").glob("*.pbtxt")),
    ids=lambda file: file.stem,
)
def test_fields_of_real_configs_are_supported(file: Path) -> None:
    reported = [line.split()[1] for line in unsupported(file.read_text())]
    fields = ["cc_model_filenames", *(f"optimization[0].{name}" for name in TENSORRT_ONLY)]
    assert sorted(reported) == (sorted(f"{field}:" for field in fields) if file.stem == "decoupled" else [])


def test_each_top_level_field_of_the_schema_is_supported_or_reported() -> None:
    ignored = {
        "runtime", "cc_model_filenames", "model_operations", "model_repository_agents",
    }  # fmt: skip
    for field in new_model_config().DESCRIPTOR.fields:
        message = new_model_config()
        write(message, field)
        reported = [line.split()[1] for line in unsupported(text_format.MessageToString(message))]
        assert reported == ([f"{field.name}:"] if field.name in ignored else [])


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
