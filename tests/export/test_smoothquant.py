"""Smoothed weights are equivalent, and lose less in quantization."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from genserve.export.conversion import Conversion
from genserve.export.reference import Reference
from genserve.export.source_model import run_source
from genserve.sampling.logits_array import FloatArray
from tests.export.graphs import conversion_of, write_conversion
from tests.export.rows import logits_of
from tests.export.test_families import MAX_DIFFERENCE, difference_of
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.support.representatives import with_extended

READERS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "gate", "up"))


ALWAYS = (
    "llama",
    "gpt2",
    "cohere",   # one norm of attention and MLP, and a scale of logits
    "olmo",     # norms without weights
    "olmo2",    # no norms before attention and MLP
)
OTHERS = ("bloom_4_heads", "gpt_neox", "gemma", "gemma2", "opt", "glm4", "granite", "nemotron", "phi")


@pytest.mark.parametrize("model", with_extended(ALWAYS + OTHERS, always=ALWAYS))
def test_smoothing_does_not_change_the_outputs(tmp_path: Path, model: str) -> None:
    # In fp32 a tied head is stored once, and cannot be smoothed.
    config = {**TINY_MODELS[model], "tie_word_embeddings": False}
    source = tiny_checkpoint(tmp_path / "checkpoint", **config)
    conversion = conversion_of(source, precision="int8")
    reference = observed(conversion)
    assert reference.activations.keys() == conversion.norms.keys()
    graph = write_conversion(exact(conversion), tmp_path / "graph", reference=reference)
    assert difference_of(graph, source) < MAX_DIFFERENCE


def test_smoothing_halves_the_rounding_error_of_outlier_channels(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["llama"])
    conversion = with_large_channels(conversion_of(source, precision="int8"))
    rough = write_conversion(conversion, tmp_path / "rough")
    smooth = write_conversion(conversion, tmp_path / "smooth", reference=observed(conversion))
    plain = write_conversion(exact(conversion), tmp_path / "exact")
    ids = np.random.default_rng(0).integers(3, 320, 60)
    logits = [logits_of(graph.logits(max_num_seqs=1, max_length=60), ids) for graph in (plain, rough, smooth)]
    rough_error, smooth_error = (np.square(found - logits[0]).mean() ** 0.5 for found in logits[1:])
    assert smooth_error < rough_error / 2


def observed(conversion: Conversion) -> Reference:
    return run_source(conversion.layout.checkpoint, context_length=64, norms=conversion.norms)


def exact(conversion: Conversion) -> Conversion:
    """The same in fp32."""
    return replace(conversion, layout=replace(conversion.layout, precision="fp32"))


def with_large_channels(conversion: Conversion) -> Conversion:
    """An equivalent model, in which norms have outlier channels a hundred times as large."""
    checkpoint = conversion.layout.checkpoint

    def larger(name: str, rows: slice) -> FloatArray:
        tensor = checkpoint.load(name, rows).copy()
        if name.endswith("layernorm.weight"):
            tensor[::13] *= 100
        elif name.endswith(READERS):
            tensor[:, ::13] /= 100
        return tensor

    layout = replace(conversion.layout, checkpoint=replace(checkpoint, load=larger))
    return replace(conversion, layout=layout)
