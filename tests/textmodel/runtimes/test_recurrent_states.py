"""The recurrent states of hybrid models: how many slots there are, and pipelines whose stages have some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from genserve.errors import RepositoryError
from genserve.textmodel.logits_config import pipeline_files
from genserve.textmodel.runtimes.kv_cache_memory import slot_bytes
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from genserve.textmodel.runtimes.pipeline_logits import PipelineLogits
from tests.export.graphs import write_graph
from tests.export.rows import BlockPool, Row
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint

CONFIG = {**TINY_MODELS["lfm2"], "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("hybrid") / "checkpoint", **CONFIG)


@pytest.fixture(scope="module")
def graph(checkpoint: Path) -> Path:
    return write_graph(checkpoint, checkpoint.parent / "graph").folder / "model.onnx"


def test_there_are_two_slots_for_each_sequence_and_as_many_for_prefixes(graph: Path) -> None:
    model = OnnxLogits(graph, max_num_seqs=3, max_length=32)
    assert model.num_state_slots == 12
    assert all(states.shape == (12, 2, 64) for states in model.cache.states.values())


def test_states_take_half_of_the_cache_at_most(graph: Path) -> None:
    slot = slot_bytes({"conv": (2, 64), "other": (2, 64)})
    model = OnnxLogits(graph, max_num_seqs=8, max_length=32, kv_cache_bytes=2 * 20 * slot)
    assert model.num_state_slots == 20
    assert 20 * slot < model.kv_cache_bytes <= 2 * 20 * slot


def test_as_many_sequences_run_as_have_room_for_their_states(
    graph: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slot = slot_bytes({"conv": (2, 64), "other": (2, 64)})
    model = OnnxLogits(graph, max_num_seqs=8, max_length=32, kv_cache_bytes=2 * 15 * slot)
    assert (model.max_num_seqs, model.num_state_slots) == (7, 15)
    assert "7 sequences run concurrently, not max_batch_size 8" in caplog.text
    with pytest.raises(RepositoryError, match=r"\b1024\b"):
        OnnxLogits(graph, max_num_seqs=8, max_length=32, kv_cache_bytes=2 * slot)


@pytest.mark.parametrize("max_micro_batch", [5, 64])
def test_a_pipeline_has_the_bits_of_one_graph(checkpoint: Path, graph: Path, max_micro_batch: int) -> None:
    """Micro-batches of 5 tokens divide the sequences. One stage has no layer with attention of its own."""
    written = write_graph(checkpoint, checkpoint.parent / f"stages_{max_micro_batch}", pipeline_stages=3)
    files = pipeline_files(written.folder / "model.onnx", num_stages=3)
    pipeline = PipelineLogits(files, max_num_seqs=2, max_length=64, max_micro_batch=max_micro_batch)
    texts = [np.random.default_rng(length).integers(3, 320, length) for length in (41, 20)]
    found, expected = (
        BlockPool(model).run([Row(ids) for ids in texts], length=13)
        for model in (pipeline, OnnxLogits(graph, max_num_seqs=2, max_length=64))
    )
    pipeline.close()
    for logits, alone in zip(found, expected, strict=True):
        assert logits.tobytes() == alone.tobytes()
