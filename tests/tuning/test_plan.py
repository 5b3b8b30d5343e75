"""Which settings of a stage are measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from genserve.errors import RepositoryError
from genserve.repository.index import ModelEntry, scan
from genserve.tuning.search_space import SearchSpace, make_search_space, thread_counts

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
