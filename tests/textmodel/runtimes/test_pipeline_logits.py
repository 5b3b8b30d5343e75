"""Pipelines of logits graphs: the bits of one graph, failures of a stage, micro-batches, threads."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from genserve.engine.engine import Engine
from genserve.engine.logits_model import LogitsModel
from genserve.errors import RepositoryError
from genserve.export.export_options import CacheType, Precision
from genserve.textmodel.logits_config import pipeline_files
from genserve.textmodel.runtimes.kv_cache_memory import DeviceMemory, HostMemory
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from genserve.textmodel.runtimes.pipeline_logits import PipelineLogits, StageCost, num_micro_batches
from tests.export.graphs import write_graph
from tests.export.rows import BlockPool, Row, forward_batch, logits_of
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.fakes.sequences import Clock, sample_loop, sequence_of
from tests.support.representatives import with_extended

MAX_LENGTH = 100


def random_ids(count: int, *, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, 60, count)


def pipeline(
    folder: Path, *, num_stages: int = 2, max_micro_batch: int | None = 7, **options
) -> PipelineLogits:
    return PipelineLogits(
        pipeline_files(folder / "model.onnx", num_stages=num_stages),
        max_num_seqs=4,
        max_length=MAX_LENGTH,
        max_micro_batch=max_micro_batch,
        **options,
    )


def mixed_steps(model: LogitsModel) -> NDArray[np.float32]:
    """Prompts, chunks, decodes and drafts of four rows in the same forwards, and all their logits."""
    rows = [Row(random_ids(length, seed=length)) for length in (60, 41, 33, 9)]
    pool, found = BlockPool(model, seed=0), []
    for lengths in ([17, 0, 30, 1], [20, 41, 1, 1], [1, 0, 1, 6], [22, 0, 1, 1]):
        company = [index for index, length in enumerate(lengths) if length]
        found += pool.forward([rows[index] for index in company], lengths=[lengths[i] for i in company])
    return np.concatenate(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str
    layers: str  # the key of their number in the config
    precision: Precision
    kv_cache: CacheType = "float"
    num_stages: int = 2


CASES = (
    Case(model="llama", layers="num_hidden_layers", precision="int8"),
    Case(model="llama", layers="num_hidden_layers", precision="int8", kv_cache="int8", num_stages=3),
    Case(model="gpt2", layers="n_layer", precision="fp32", num_stages=3),
    Case(model="bloom_6_heads", layers="n_layer", precision="int4"),
    Case(model="gemma2", layers="num_hidden_layers", precision="int8", num_stages=3),
    Case(model="gpt_neox", layers="num_hidden_layers", precision="int4", num_stages=3),
)


@pytest.mark.parametrize(
    "case",
    with_extended(CASES, always=CASES[1:3]),
    ids=lambda case: f"{case.model}-{case.precision}-{case.num_stages}",
)
def test_the_bits_are_those_of_one_graph_in_any_micro_batches(tmp_path, case):
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS[case.model] | {case.layers: 3})
    folders = [
        write_graph(
            checkpoint,
            tmp_path / str(number),
            precision=case.precision,
            kv_cache=case.kv_cache,
            pipeline_stages=number,
        ).folder
        for number in (1, case.num_stages)
    ]
    whole = OnnxLogits(folders[0] / "model.onnx", max_num_seqs=4, max_length=MAX_LENGTH, num_threads=1)
    expected = mixed_steps(whole)
    for max_micro_batch in (1, 7, 200, None):
        staged = pipeline(folders[1], num_stages=case.num_stages, max_micro_batch=max_micro_batch)
        assert staged.num_blocks == whole.num_blocks
        assert staged.kv_cache_bytes == whole.kv_cache_bytes
        np.testing.assert_array_equal(mixed_steps(staged), expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    return write_graph(tiny_checkpoint, tmp_path_factory.mktemp("staged"), pipeline_stages=2).folder


@pytest.fixture
def staged(folder: Path) -> PipelineLogits:
    return pipeline(folder)


def test_stages_on_devices_pass_their_hidden_states_on(folder, staged):
    """Torch tensors on the CPU stand for the memory of two GPUs."""
    on_devices = pipeline(folder, memories=[DeviceMemory("cpu"), DeviceMemory("cpu")])
    assert on_devices.block_size == 256
    np.testing.assert_array_equal(logits_of(on_devices, random_ids(50)), logits_of(staged, random_ids(50)))


def test_stages_in_fp16_are_as_close_as_its_rounding(tmp_path, tiny_checkpoint):
    """The CPU computes an fp16 graph in fp32, and rounds what one stage passes to the next."""
    files = [
        write_graph(tiny_checkpoint, tmp_path / str(number), precision="fp16", pipeline_stages=number).folder
        for number in (1, 2)
    ]
    whole = OnnxLogits(files[0] / "model.onnx", max_num_seqs=4, max_length=MAX_LENGTH)
    devices = [DeviceMemory("cpu"), DeviceMemory("cpu")]
    found = mixed_steps(pipeline(files[1], memories=devices))
    np.testing.assert_allclose(found, mixed_steps(whole), atol=0.01)


class SmallDevice(DeviceMemory):
    """Memory of which as many bytes are free, on a device of its own."""

    def __init__(self, device_id: int, free_bytes: int) -> None:
        super().__init__("cpu")
        self.device_id = device_id
        self._free_bytes = free_bytes

    def free_bytes(self) -> int | None:
        return self._free_bytes


def test_the_device_with_the_least_room_decides_the_size_of_the_cache(folder):
    block_bytes = 256 * 2 * 2 * 16 * 4  # per layer: tokens, keys and values, heads, numbers, bytes
    # The graphs do not run with such device ids, so only the sizes are asked for.
    with pytest.raises(RepositoryError, match="no room for one block"):
        pipeline(folder, memories=[SmallDevice(0, 100 * block_bytes), SmallDevice(1, block_bytes)])
    shared = [SmallDevice(0, 4 * block_bytes), SmallDevice(0, 4 * block_bytes)]
    assert pipeline(folder, memories=shared).num_blocks == 1  # half of the memory, for two layers


def test_devices_of_two_kinds_are_rejected(folder):
    class Gpu(HostMemory):
        device = "cuda"

    with pytest.raises(RepositoryError, match="run on devices of one kind"):
        pipeline(folder, memories=[Gpu(), HostMemory()])


def test_files_of_two_exports_are_rejected(folder, tmp_path, tiny_checkpoint):
    mixed = shutil.copytree(folder, tmp_path / "mixed")
    other = write_graph(tiny_checkpoint, tmp_path / "other", precision="int8", pipeline_stages=2).folder
    for file in other.glob("model.stage2.*"):
        shutil.copy(file, mixed)
    with pytest.raises(RepositoryError, match=r"stage2\.onnx and model\.onnx") as caught:
        pipeline(mixed)
    assert "--overwrite" in caught.value.remedy


def test_stages_in_another_order_are_rejected(folder):
    files = pipeline_files(folder / "model.onnx", num_stages=2)
    with pytest.raises(RepositoryError, match=r"stage2\.onnx is stage 2 of a pipeline of 2; .* stage 1"):
        PipelineLogits(files[::-1], max_num_seqs=4)


@pytest.mark.parametrize("max_micro_batch", [3, 200])
def test_an_error_of_a_stage_ends_the_forward_and_the_next_one_runs(folder, max_micro_batch):
    model = pipeline(folder, max_micro_batch=max_micro_batch)
    whole_rows = logits_of(model, random_ids(9))
    row = Row(random_ids(12), blocks=[2**20])
    for _ in range(3):
        with pytest.raises(Exception, match="block_table"):  # onnxruntime's share no base class
            model.forward(forward_batch([Row(random_ids(8), blocks=[0]), row], [8, 12]))
    np.testing.assert_array_equal(logits_of(model, random_ids(9)), whole_rows)


def test_an_error_of_a_stage_ends_the_sequences_of_the_step(staged):
    def fail(batch, output, *, hidden_states=None):
        raise RuntimeError("out of memory")

    engine = Engine(staged, decode=sample_loop, clock=Clock())
    sizes = {"max_length": MAX_LENGTH, "vocab_size": staged.vocab_size}
    sequences = [sequence_of(random_ids(20, seed=seed).tolist(), max_tokens=4, **sizes) for seed in range(2)]
    for sequence in sequences:
        engine.add(sequence)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged.graphs[0], "run", fail)
        result = engine.step()
    assert result is not None
    assert set(result.failed) == set(sequences)
    after = sequence_of(random_ids(20, seed=3).tolist(), max_tokens=4, **sizes)
    engine.add(after)
    while not after.finished:
        engine.step()
    assert after.num_new_tokens == 4


def test_the_threads_end_when_the_model_is_closed_or_dropped(folder):
    for is_closed in (True, False):
        before = set(threading.enumerate())
        model = pipeline(folder, max_micro_batch=2)
        logits_of(model, random_ids(9))
        [worker] = set(threading.enumerate()) - before
        if is_closed:
            model.close()
        else:
            del model
            worker.join(timeout=60)
        assert not worker.is_alive()


def test_a_stage_that_costs_nothing_per_token_gets_one_batch():
    """As on a GPU, where a decode reads all weights for any number of sequences."""
    costs = (StageCost(run_s=0.01, token_s=0.0),) * 4
    assert num_micro_batches(costs, 64) == 1


def test_a_stage_that_costs_only_by_the_token_gets_many_micro_batches():
    costs = (StageCost(run_s=0.0, token_s=0.001),) * 2
    assert num_micro_batches(costs, 1) == 1
    assert num_micro_batches(costs, 4) == 4
    assert num_micro_batches(costs, 256) == 16
    assert num_micro_batches(costs[:1], 256) == 1  # nothing overlaps


def test_the_number_of_micro_batches_balances_the_fill_of_the_pipeline_with_its_runs():
    """Without the hand-over, the best number is sqrt((stages - 1) * tokens * token_s / run_s)."""
    costs = (StageCost(run_s=0.1, token_s=0.01),) * 3
    assert num_micro_batches(costs, 160) == pytest.approx((2 * 160 * 0.01 / 0.1) ** 0.5, abs=1)
