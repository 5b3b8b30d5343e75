"""Family: one class of architectures, and how its checkpoints become graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from genserve.export.checkpoint import Checkpoint
from genserve.export.layers import Layers

__all__ = ["Dimensions", "Family"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The sizes of a model that the stages around its graph need to know."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a file of a family offers; add it to the table in `architectures.py`.

    The graph that `write` adds is the one that the onnxruntime backend runs:

    inputs
        input_ids [batch, sequence] int64; seqlens_k [batch] int32: tokens in the cache + sequence - 1;
        total_len [] int32: the largest of seqlens_k, plus 1; rows [num_rows] int64: which of the
        batch * sequence hidden rows reach the head; past_key_values.{i}.key and .value
        [batch, kv_heads, max_len, head_dim], in the type of the activations.
    outputs
        logits [num_rows, vocab] float32; present.{i}.key and .value: the past's buffer, written in place.
    """

    name: str
    # Reads config.json; refuses by name (ExportError) what `write` would not honour.
    dimensions: Callable[[Mapping[str, Any]], Dimensions]
    # Writes the graph; calls the last argument with 1 after each layer.
    write: Callable[[Checkpoint, Layers, Callable[[int], None]], None]
