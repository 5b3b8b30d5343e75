from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from genserve.errors import RepositoryError
from genserve.machine import num_cores
from genserve.repository.index import ModelEntry, scan
from genserve.tuning.search_space import (
    SearchSpace,
    Setting,
    make_search_space,
    state_types,
    thread_counts,
    top1_agreement,
    with_setting,
)


def test_the_state_types_are_those_of_the_graphs_inputs(tiny_repository: Path) -> None:
    types = state_types(tiny_repository / "tiny_logits" / "1" / "model.onnx")
    layers = (f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value"))
    assert types == dict.fromkeys(layers, "TYPE_FP32")


def test_the_agreement_is_that_of_the_export(tiny_repository: Path) -> None:
    assert top1_agreement(tiny_repository / "tiny_logits" / "1" / "model.onnx") == 1.0


@pytest.mark.parametrize("content", [None, "", "[]", "{}", json.dumps({"top1_agreement": "good"})])
def test_a_graph_without_a_parity_file_has_no_agreement(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "parity.json").write_text(content)
    assert top1_agreement(tmp_path / "model.onnx") is None


def test_a_setting_survives_a_round_trip_through_the_config(repository: Path) -> None:
    setting = Setting(graph="model.onnx", threads=num_cores() + 3, batch_size=5)
    changed = with_setting(scan([repository])["tiny_logits"], setting)
    assert changed.config is not None
    assert Setting.from_config(changed.config) == setting
    assert changed.config.parameters["max_sequence_length"] == "256"


CORES = len(os.sched_getaffinity(0))


def stage(repository: Path) -> ModelEntry:
    return scan([repository])["tiny_logits"]


def test_the_default_space_has_powers_of_two_parts_of_the_cores_and_the_current_setting(
    repository: Path,
) -> None:
    config = repository / "tiny_logits" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 32", "max_batch_size: 24"))
    assert make_search_space(stage(repository)) == SearchSpace(
        graphs=("model.onnx",),
        threads=thread_counts(CORES),
        batch_sizes=(1, 2, 4, 8, 16, 24, 32, 64),
        contexts=(64, 512),
    )


def test_given_values_are_measured_with_the_current_ones(repository: Path) -> None:
    space = make_search_space(stage(repository), batch_sizes=[4, 2, 4], threads=[CORES + 1], contexts=[9])
    assert space.batch_sizes == (2, 4, 32)
    assert space.threads == (CORES, CORES + 1)
    assert space.contexts == (9,)


def test_graphs_in_subfolders_are_measured_and_their_weights_are_not_graphs(repository: Path) -> None:
    folder = repository / "tiny_logits" / "1"
    for name in ("int4/model.onnx", "int4/model.onnx.data", "int4/in/model.onnx", "ts/model.pt", "b.onnx"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    assert make_search_space(stage(repository)).graphs == ("int4/model.onnx", "model.onnx")


@pytest.mark.parametrize(("cores", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 3, 6)), (64, (16, 32, 64))])
def test_threads_are_all_cores_half_and_a_quarter(cores: int, counts: tuple[int, ...]) -> None:
    assert thread_counts(cores) == counts


def test_a_stage_without_batching_is_rejected(repository: Path) -> None:
    config = repository / "tiny_logits" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 32", ""))
    with pytest.raises(RepositoryError, match="'tiny_logits' has max_batch_size 0"):
        make_search_space(stage(repository))
