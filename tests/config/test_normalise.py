"""Defaults that depend on the machine; the others are compared with a real Triton in test_config_json.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from genserve.config.normalise import normalise, renumber_gpus
from genserve.config.schema import new_model_config
from genserve.errors import RepositoryError


def normalised(text: str, *, gpus: int, strict: bool = False):
    """(kind, count, GPUs) of each group, and `severity: message` of each diagnostic."""
    message = text_format.Parse(f'backend: "python" {text}', new_model_config())
    diagnostics = normalise(message, model_folder=Path("m"), gpus=gpus, strict_placement=strict)
    groups = message.instance_group
    placed = [(group.Kind.Name(group.kind), group.count, list(group.gpus)) for group in groups]
    return placed, [f"{diagnostic.severity.value}: {diagnostic.message}" for diagnostic in diagnostics]


@pytest.mark.parametrize(
    ("text", "gpus", "groups"),
    [
        ("", 0, [("KIND_CPU", 1, [])]),
        ("", 2, [("KIND_GPU", 1, [0, 1])]),
        ("instance_group { count: 3 }", 1, [("KIND_GPU", 3, [0])]),
        ("instance_group { gpus: [ 1 ] }", 2, [("KIND_GPU", 1, [1])]),
        ("instance_group { gpus: [ 0, 1 ] }", 1, [("KIND_CPU", 1, [])]),
        ("instance_group { kind: KIND_MODEL }", 2, [("KIND_MODEL", 1, [])]),
        ("instance_group { kind: KIND_GPU } instance_group { kind: KIND_CPU count: 2 }", 1,
         [("KIND_GPU", 1, [0]), ("KIND_CPU", 2, [])]),
    ],
)  # fmt: skip
def test_instances_are_placed_on_available_devices(text, gpus, groups):
    assert normalised(text, gpus=gpus) == (groups, [])


@pytest.mark.parametrize(
    ("text", "gpus", "groups", "message"),
    [
        ("instance_group { kind: KIND_GPU }", 0, [("KIND_CPU", 1, [])],
         "instance group m_0 of model m has kind KIND_GPU but no GPUs are available"),
        ("instance_group { kind: KIND_GPU gpus: [ 0, 1 ] }", 0, [("KIND_CPU", 1, [])],
         "instance group m_0 of model m has kind KIND_GPU but no GPUs are available"),
        ("instance_group { name: \"g\" kind: KIND_GPU gpus: [ 0, 3 ] }", 2, [("KIND_GPU", 1, [0])],
         "instance group g of model m specifies invalid or unsupported gpu id 3. Available GPUs: 0, 1"),
    ],
)  # fmt: skip
def test_missing_gpus_are_a_warning_or_with_strict_placement_an_error(text, gpus, groups, message):
    assert normalised(text, gpus=gpus) == (groups, [f"warning: {message}"])
    assert normalised(text, gpus=gpus, strict=True) == (groups, [f"error: {message}"])


def test_the_gpus_of_a_replica_are_numbered_from_0_in_the_order_of_the_config() -> None:
    message = new_model_config()
    text_format.Parse(
        "instance_group [ { gpus: [ 6, 2 ] }, { gpus: [ 2 ] }, { kind: KIND_CPU } ]", message
    )
    renumber_gpus(message)
    assert [list(group.gpus) for group in message.instance_group] == [[1, 0], [0], []]


def test_normalising_twice_changes_nothing(tmp_path: Path):
    message = new_model_config()
    message.backend, message.max_batch_size = "python", 4
    message.sequence_batching.oldest.SetInParent()
    normalise(message, model_folder=tmp_path)
    once = message.SerializeToString(deterministic=True)
    normalise(message, model_folder=tmp_path)
    assert message.SerializeToString(deterministic=True) == once


def test_a_model_whose_backend_cannot_be_deduced_is_rejected():
    with pytest.raises(RepositoryError, match=r"form 'model\.<backend_name>'"):
        normalise(new_model_config(), model_folder=Path("m"))
