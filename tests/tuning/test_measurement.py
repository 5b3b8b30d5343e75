from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from genserve.config.parse import config_of
from genserve.errors import RepositoryError
from genserve.machine import num_cores
from genserve.repository.index import ModelEntry, scan
from genserve.tuning.measurement import Sample, Samples, take_samples
from genserve.tuning.search_space import SearchSpace, Setting
from genserve.tuning.tuned_model import find_model
from tests.support.stage_chains import WHOLE_CONFIG, add_chain, whole_torchscript

FOUR = Setting(graph="model.onnx", threads=2, batch_size=4)
EIGHT = Setting(graph="model.onnx", threads=2, batch_size=8)


def sample(setting: Setting, context: int, *steps_s: float, cpu_s: float = 0.1) -> Sample:
    return Sample(setting=setting, context=context, steps_s=steps_s, cpu_s=cpu_s, token_bytes=1000)


def test_a_measurement_is_the_median_of_all_rounds_at_each_context() -> None:
    samples = Samples()
    samples.add(sample(FOUR, 512, 0.3, 0.3, 9.0))
    samples.add(sample(FOUR, 64, 0.1))
    samples.add(sample(FOUR, 512, 0.2, 0.2))
    [measurement] = samples.measurements()
    assert measurement.step_s == {64: 0.1, 512: 0.3}
    assert measurement.inter_token_s == 0.3
    assert measurement.tokens_per_s == pytest.approx(2 * 4 / (0.1 + 0.3))
    assert measurement.cache_bytes == 4 * 512 * 1000


def test_a_setting_without_samples_at_every_context_is_left_out() -> None:
    samples = Samples()
    samples.add(sample(EIGHT, 64, 0.1))
    samples.add(sample(FOUR, 64, 0.1))
    samples.add(sample(FOUR, 512, 0.1))
    assert [measurement.setting for measurement in samples.measurements()] == [FOUR]


def test_without_samples_there_are_no_measurements() -> None:
    assert Samples().measurements() == []


def test_the_stolen_share_is_relative_to_the_time_of_all_steps() -> None:
    samples = Samples()
    assert samples.stolen_share == 0
    samples.add(sample(FOUR, 64, 0.1, 0.1, cpu_s=0.15))
    samples.add(sample(EIGHT, 64, 0.6, cpu_s=0.45))
    assert samples.stolen_share == pytest.approx(0.25)
    samples.add(sample(EIGHT, 64, 0.2, cpu_s=0.9))
    assert samples.stolen_share == 0


SPACE = SearchSpace(graphs=("model.onnx",), threads=(1, 2), batch_sizes=(1, 3), contexts=(4, 9))
FOREVER = 1e9


@pytest.fixture(scope="module")
def stage(tiny_repository: Path) -> ModelEntry:
    return scan([tiny_repository])["tiny_logits"]


def test_each_round_samples_every_setting_at_every_context(stage: ModelEntry) -> None:
    taken = list(itertools.islice(take_samples(stage, SPACE, budget_s=FOREVER, max_step_s=FOREVER), 16))
    turns = [(s.setting.threads, s.setting.batch_size, s.context) for s in taken]
    every = [(1, 1, 4), (1, 1, 9), (1, 3, 4), (1, 3, 9), (2, 1, 4), (2, 1, 9), (2, 3, 4), (2, 3, 9)]
    assert turns == every + every[4:] + every[:4]
    assert all(s.setting.graph == "model.onnx" and min(s.steps_s) > 0 for s in taken)
    # Two layers, keys and values, two heads of 16, float32.
    assert {s.token_bytes for s in taken} == {2 * 2 * 2 * 16 * 4}


def test_the_first_round_is_complete_whatever_the_budget(stage: ModelEntry) -> None:
    assert len(list(take_samples(stage, SPACE, budget_s=0, max_step_s=FOREVER))) == 8 + 1


def test_a_session_with_too_slow_a_step_gets_no_larger_batch(stage: ModelEntry) -> None:
    taken = list(take_samples(stage, SPACE, budget_s=0, max_step_s=0))
    assert {s.setting.batch_size for s in taken} == {1}
    assert {s.context for s in taken} == {4, 9}


def test_batches_that_the_cache_cannot_hold_are_skipped(stage: ModelEntry) -> None:
    message = deepcopy(stage.parsed.message)
    message.parameters["kv_cache_bytes"].string_value = str(2 * 256 * 512)
    small = replace(stage, parsed=config_of(message, path=stage.parsed.path, folder=stage.path))
    space = replace(SPACE, batch_sizes=(1, 2, 3), contexts=(200,))
    taken = take_samples(small, space, budget_s=0, max_step_s=FOREVER)
    assert {s.setting.batch_size for s in taken} == {1, 2}


def test_a_context_is_limited_by_the_context_length(stage: ModelEntry) -> None:
    space = replace(SPACE, contexts=(64, 300, 400))
    assert {s.context for s in take_samples(stage, space, budget_s=0, max_step_s=0)} == {64, 255}


def test_a_graph_that_cannot_be_loaded_is_named(stage: ModelEntry) -> None:
    space = SearchSpace(graphs=("model.none.onnx",), threads=(1,), batch_sizes=(1,), contexts=(4,))
    with pytest.raises(RepositoryError, match=r"model\.none\.onnx"):
        next(take_samples(stage, space, budget_s=0, max_step_s=FOREVER))


@pytest.fixture
def all_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_cores())
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("all_cores")
def test_a_graph_without_a_cache_runs_with_the_threads_of_its_config(
    tiny_repository: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    tensors = {"input_ids": "INPUT__0", "logits": "OUTPUT__0"}
    version = add_chain(tiny_repository, tmp_path, name="whole", logits_config=WHOLE_CONFIG, **tensors)
    whole_torchscript(version / "model.pt", tiny_checkpoint)
    before = torch.get_num_threads()
    model = find_model("whole", repository=tmp_path)
    space = SearchSpace(graphs=("model.pt",), threads=(before + 1,), batch_sizes=(2,), contexts=(9, 200))
    try:
        taken = list(itertools.islice(take_samples(model.logits, space, budget_s=0, max_step_s=FOREVER), 2))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert [(s.context, s.token_bytes) for s in taken] == [(9, 0), (127, 0)]
    written = f'"INTRA_OP_THREAD_COUNT" value: {{ string_value: "{before + 1}" }}'
    assert any(written in edit.after for edit in model.edits(taken[0].setting))
