"""Int8 cache: a graph with its keys and values in 8 bits, each channel of a head in steps of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from genserve.export.cached_graph import CachedGraph
from genserve.export.checkpoint import FloatArray
from genserve.export.decoder import Decoder
from genserve.export.graph import MODEL_FILE

__all__ = ["round_cache"]

_LARGEST = 127
_FIRST_SCALE = 12       # of GroupQueryAttention's inputs: the keys' scales; those of the values are the next
_ATTRIBUTES: Mapping[str, Any] = {
    "k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8
}


def round_cache(folder: Path, decoder: Decoder, *, ids: NDArray[np.int64]) -> None:
    """Let a graph keep its KV cache in int8; its weights stay where they are.

    What a channel holds at the most, over a text, becomes 127; what is larger in another text becomes that
    too. Channels of keys that turn against each other by the position share the length of their pair, which
    no position changes: with scales from 256 positions alone, SmolLM2-135M has another first token in 34 %
    of the places behind 1,800.

    Args:
        folder: of a graph of `write_decoder`.
        decoder: what the graph computes.
        ids: [rows, tokens] of the text.
    """
    scales = _scales(CachedGraph(folder, batch=1, max_len=ids.shape[1]), decoder, ids)
    path = folder / MODEL_FILE
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            weights = _round(node, scales)
            model.graph.initializer.extend(weights)
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past_key_values.", "present.")):
            value.type.tensor_type.elem_type = TensorProto.INT8
    path.write_bytes(model.SerializeToString())


def _scales(graph: CachedGraph, decoder: Decoder, ids: NDArray[np.int64]) -> dict[str, FloatArray]:
    """By the name of a buffer, what 1 stands for: [1, kv_heads, 1, head_dim]."""
    pairs = {
        f"past_key_values.{index}.key": len(attention.rotary.frequencies)
        for index, attention in enumerate(decoder.attentions)
        if attention.rotary
    }
    largest: dict[str, FloatArray] = {}
    for row in ids:
        graph.forward(row[None], past=[0], rows=[0])
        for name, cache in graph.caches.items():
            magnitudes = _magnitudes(cache, num_pairs=pairs.get(name, 0)).max(axis=2, keepdims=True)
            largest[name] = np.maximum(magnitudes, largest.get(name, 0))
    # A channel that is 0 throughout has any scale but 0.
    return {
        name: (np.where(value > 0, value, 1) / _LARGEST).astype(np.float32)
        for name, value in largest.items()
    }


def _magnitudes(cache: NDArray[Any], *, num_pairs: int) -> FloatArray:
    """How large each number can be, at whichever position; those behind the pairs do not turn."""
    magnitudes: FloatArray = np.abs(cache, dtype=np.float32)
    turning = magnitudes[..., : 2 * num_pairs].reshape(*cache.shape[:-1], 2, num_pairs)
    lengths = np.linalg.norm(turning, axis=-2)
    magnitudes[..., : 2 * num_pairs] = np.concatenate([lengths, lengths], axis=-1)
    return magnitudes


def _round(node: NodeProto, scales: Mapping[str, FloatArray]) -> list[TensorProto]:
    """Let a GroupQueryAttention use an int8 cache; returns the weights that it reads."""
    weights = [numpy_helper.from_array(scales[name], f"{name}.scale") for name in node.input[3:5]]
    node.input.extend([""] * (_FIRST_SCALE - len(node.input)))
    node.input.extend(weight.name for weight in weights)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in _ATTRIBUTES.items())
    return weights
