"""A sequence's logits have the same bits in any batch, in any chunks and in any blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from genserve.export import CacheType, Precision
from tests.export.graphs import WrittenGraph, write_graph
from tests.export.rows import BlockPool, Row
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.support.representatives import with_extended

# Precision and KV cache: keys and values in fp32, fp16 and int8.
NUMBERS: dict[str, tuple[Precision, CacheType]] = {
    "fp32": ("fp32", "float"),
    "int8": ("int8", "float"),
    "int4": ("int4", "float"),
    "kv8": ("int8", "int8"),
}
# A model of each family, with all options of graphs.
MODELS = (
    "bloom_6_heads",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2_odd",
    "gpt_neox",
    "gpt_neox_odd",
    "llama_biases",
    "mistral",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "apertus",
    "cohere_head_norms",
    "glm4",
    "hunyuan",
    "ministral3",
    "nemotron",
    "olmo",
    "olmo2",
    "stablelm_parallel",
    "gemma3n",
    "gemma4",
    "gemma4_experts",
    "llama4",
)
NUM_ROWS, MAX_LENGTH = 33, 100


# Between them: biases by distance and of projections, windows and norms of heads, rotations, the operators of
# ONNX around ours, and shared caches.
ALWAYS = {"bloom_6_heads", "gemma4"}


@pytest.fixture(
    scope="module",
    params=with_extended(MODELS, always=ALWAYS),
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_checkpoint(folder / "checkpoint", **TINY_MODELS[request.param])


@pytest.fixture(scope="module", params=with_extended(NUMBERS, always={"int4", "kv8"}))
def graph(checkpoint: Path, request: pytest.FixtureRequest) -> WrittenGraph:
    precision, kv_cache = NUMBERS[request.param]
    return write_graph(checkpoint, checkpoint.parent / request.param, precision=precision, kv_cache=kv_cache)


def test_the_logits_of_a_sequence_do_not_depend_on_batch_chunks_and_blocks(graph: WrittenGraph) -> None:
    compare(graph, ragged_rows(NUM_ROWS, longest=MAX_LENGTH), chunks=(1, 7, 16, 33))


@pytest.mark.parametrize("numbers", with_extended(NUMBERS, always=("fp32", "kv8")))
def test_the_logits_of_a_long_context_do_not_depend_on_them_either(tmp_path: Path, numbers: str) -> None:
    """Attention sums long contexts in segments."""
    config = {**TINY_MODELS["llama"], "max_position_embeddings": 1200}
    precision, kv_cache = NUMBERS[numbers]
    source = tiny_checkpoint(tmp_path / "checkpoint", **config)
    graph = write_graph(source, tmp_path / "graph", precision=precision, kv_cache=kv_cache)
    rows = [random_ids(length) for length in (1100, 1025, 513, 512, 40)]
    compare(graph, rows, chunks=(33, 511))


def compare(graph: WrittenGraph, rows: list[NDArray[np.int64]], *, chunks: tuple[int, ...]) -> None:
    length = max(map(len, rows))
    sizes = {"max_num_seqs": len(rows), "max_length": length}
    one, two = (BlockPool(graph.logits(**sizes, num_threads=n), seed=n) for n in (1, 2))
    alone = [one.run([Row(ids)], length=length)[0] for ids in rows]
    for pool, size in [(one, length), (two, length), *((two, size) for size in chunks)]:
        together = pool.run([Row(ids) for ids in rows], length=size)
        for found, expected in zip(together, alone, strict=True):
            np.testing.assert_array_equal(found, expected, err_msg=f"in pieces of {size}")


def ragged_rows(count: int, *, longest: int) -> list[NDArray[np.int64]]:
    return [random_ids(length) for length in np.random.default_rng(0).integers(1, longest, count)]


def random_ids(length: int) -> NDArray[np.int64]:
    return np.random.default_rng(length).integers(3, 320, length)
