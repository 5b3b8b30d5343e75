from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from genserve.backends.onnx_session import num_cores
from genserve.errors import RepositoryError
from genserve.repository.index import ModelEntry, scan
from genserve.tuning.search_space import (
    SearchSpace,
    Setting,
    configured,
    make_search_space,
    state_types,
    thread_counts,
    top1_agreement,
)


def test_the_types_of_a_cache_are_those_of_the_graph_s_inputs(tiny_repository: Path) -> None:
    types = state_types(tiny_repository / "tiny_logits" / "1" / "model.onnx")
    layers = (f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value"))
    assert types == dict.fromkeys(layers, "TYPE_FP32")


def test_the_agreement_is_what_the_export_found(tiny_repository: Path) -> None:
    assert top1_agreement(tiny_repository / "tiny_logits" / "1" / "model.onnx") == 1.0


@pytest.mark.parametrize("content", [None, "", "[]", "{}", json.dumps({"top1_agreement": "good"})])
def test_a_graph_of_unknown_make_agrees_to_an_unknown_degree(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "parity.json").write_text(content)
    assert top1_agreement(tmp_path / "model.onnx") is None


def test_a_setting_is_read_from_the_config_that_it_was_put_into(repository: Path) -> None:
    setting = Setting(graph="model.onnx", threads=num_cores() + 3, batch_size=5)
    changed = configured(scan([repository])["tiny_logits"], setting)
    assert changed.config is not None
    assert Setting.of(changed.config) == setting
    assert changed.config.parameters["max_sequence_length"] == "256"


CORES = len(os.sched_getaffinity(0))


def stage(repository: Path) -> ModelEntry:
    return scan([repository])["tiny_logits"]


def test_the_settings_are_powers_of_two_and_parts_of_the_cores_and_those_that_are_now(
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


def test_what_is_asked_for_is_measured_beside_what_is_now(repository: Path) -> None:
    plan = make_search_space(stage(repository), batch_sizes=[4, 2, 4], threads=[CORES + 1], contexts=[9])
    assert plan.batch_sizes == (2, 4, 32)
    assert plan.threads == (CORES, CORES + 1)
    assert plan.contexts == (9,)


def test_graphs_beside_the_configured_one_are_measured_too_and_their_weights_are_none(
    repository: Path,
) -> None:
    folder = repository / "tiny_logits" / "1"
    for name in ("int4/model.onnx", "int4/model.onnx.data", "int4/in/model.onnx", "ts/model.pt", "b.onnx"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    assert make_search_space(stage(repository)).graphs == ("int4/model.onnx", "model.onnx")


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 3, 6)), (64, (16, 32, 64))]
)
def test_threads_are_all_cores_half_and_a_quarter(cores: int, counts: tuple[int, ...]) -> None:
    assert thread_counts(cores) == counts


def test_a_stage_whose_sequences_share_nothing_is_refused(repository: Path) -> None:
    config = repository / "tiny_logits" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 32", ""))
    with pytest.raises(RepositoryError, match="'tiny_logits' has max_batch_size 0"):
        make_search_space(stage(repository))
