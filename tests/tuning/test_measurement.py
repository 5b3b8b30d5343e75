from __future__ import annotations

import itertools
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from genserve.config.parse import inspect_message
from genserve.errors import RepositoryError
from genserve.repository.index import ModelEntry, scan
from genserve.tuning.measurement import Sample, Samples, samples
from genserve.tuning.search_space import SearchSpace, Setting
from genserve.tuning.tuned_model import find_model
from tests.chains import WHOLE_CONFIG, add_chain, whole_torchscript

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


def test_what_was_not_measured_at_every_context_does_not_count() -> None:
    samples = Samples()
    samples.add(sample(EIGHT, 64, 0.1))
    samples.add(sample(FOUR, 64, 0.1))
    samples.add(sample(FOUR, 512, 0.1))
    assert [measurement.setting for measurement in samples.measurements()] == [FOUR]


def test_nothing_gives_nothing() -> None:
    assert Samples().measurements() == []


def test_what_others_took_of_the_core_is_a_share_of_the_time_of_all_steps() -> None:
    samples = Samples()
    assert samples.lost_share == 0
    samples.add(sample(FOUR, 64, 0.1, 0.1, cpu_s=0.15))
    samples.add(sample(EIGHT, 64, 0.6, cpu_s=0.45))
    assert samples.lost_share == pytest.approx(0.25)
    samples.add(sample(EIGHT, 64, 0.2, cpu_s=0.9))
    assert samples.lost_share == 0


PLAN = SearchSpace(graphs=("model.onnx",), threads=(1, 2), batch_sizes=(1, 3), contexts=(4, 9))
FOREVER = 1e9


@pytest.fixture(scope="module")
def stage(tiny_repository: Path) -> ModelEntry:
    return scan([tiny_repository])["tiny_logits"]


def test_every_setting_has_its_turn_at_every_context_before_any_has_the_next(stage: ModelEntry) -> None:
    taken = list(itertools.islice(samples(stage, PLAN, budget_s=FOREVER, too_long_s=FOREVER), 16))
    turns = [(s.setting.threads, s.setting.batch_size, s.context) for s in taken]
    every = [(1, 1, 4), (1, 1, 9), (1, 3, 4), (1, 3, 9), (2, 1, 4), (2, 1, 9), (2, 3, 4), (2, 3, 9)]
    assert turns == every + every[4:] + every[:4]
    assert all(s.setting.graph == "model.onnx" and min(s.steps_s) > 0 for s in taken)
    # Two layers, keys and values, two heads of 16, float32.
    assert {s.token_bytes for s in taken} == {2 * 2 * 2 * 16 * 4}


def test_the_first_round_is_whole_however_short_the_time(stage: ModelEntry) -> None:
    assert len(list(samples(stage, PLAN, budget_s=0, too_long_s=FOREVER))) == 8 + 1


def test_a_session_that_takes_too_long_gets_no_larger_batch(stage: ModelEntry) -> None:
    taken = list(samples(stage, PLAN, budget_s=0, too_long_s=0))
    assert {s.setting.batch_size for s in taken} == {1}
    assert {s.context for s in taken} == {4, 9}


def test_what_the_cache_cannot_hold_is_not_tried(stage: ModelEntry) -> None:
    message = deepcopy(stage.parsed.message)
    message.parameters["kv_cache_bytes"].string_value = str(2 * 256 * 512)
    small = replace(stage, parsed=inspect_message(message, path=stage.parsed.path, folder=stage.path))
    plan = replace(PLAN, batch_sizes=(1, 2, 3), contexts=(200,))
    taken = samples(small, plan, budget_s=0, too_long_s=FOREVER)
    assert {s.setting.batch_size for s in taken} == {1, 2}


def test_a_context_is_no_longer_than_a_sequence_can_be(stage: ModelEntry) -> None:
    plan = replace(PLAN, contexts=(64, 300, 400))
    assert {s.context for s in samples(stage, plan, budget_s=0, too_long_s=0)} == {64, 255}


def test_a_graph_that_cannot_be_loaded_is_named(stage: ModelEntry) -> None:
    plan = SearchSpace(graphs=("model.none.onnx",), threads=(1,), batch_sizes=(1,), contexts=(4,))
    with pytest.raises(RepositoryError, match=r"model\.none\.onnx"):
        next(samples(stage, plan, budget_s=0, too_long_s=FOREVER))


def test_a_graph_without_a_cache_is_run_with_the_threads_that_its_backend_is_told_of(
    tiny_repository: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    tensors = {"input_ids": "INPUT__0", "logits": "OUTPUT__0"}
    version = add_chain(tiny_repository, tmp_path, name="whole", logits_config=WHOLE_CONFIG, **tensors)
    whole_torchscript(version / "model.pt", tiny_checkpoint)
    before = torch.get_num_threads()
    model = find_model("whole", repository=tmp_path)
    plan = SearchSpace(graphs=("model.pt",), threads=(before + 1,), batch_sizes=(2,), contexts=(9, 200))
    try:
        taken = list(itertools.islice(samples(model.logits, plan, budget_s=0, too_long_s=FOREVER), 2))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert [(s.context, s.token_bytes) for s in taken] == [(9, 0), (127, 0)]
    written = f'"INTRA_OP_THREAD_COUNT" value: {{ string_value: "{before + 1}" }}'
    assert any(written in edit.after for edit in model.edits(taken[0].setting))
