"""Decoder: what a decoder-only transformer computes, in sizes and choices, apart from its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from genserve.export.checkpoint import FloatArray

__all__ = ["Activation", "Attention", "Decoder", "Dimensions", "Rotary", "alibi_slopes"]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The sizes of a model that the stages around its graph need to know."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary positions: the first 2 * len(frequencies) numbers of a head turn, one half against the other."""

    frequencies: tuple[float, ...]  # radians per position
    scale: float = 1.0              # of cosines and sines

    def tables(self, length: int) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines of the positions below `length`: each [length, len(frequencies)]."""
        # The product in float32 as transformers has it, or high positions turn to other angles.
        angles = np.outer(np.arange(length, dtype=np.float32), np.array(self.frequencies, np.float32))
        cosines, sines = np.cos(angles, dtype=np.float64), np.sin(angles, dtype=np.float64)
        return (self.scale * cosines).astype(np.float32), (self.scale * sines).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """In what the attention of one layer may differ from that of another."""

    rotary: Rotary | None = None
    window: int | None = None  # tokens that are attended to, the newest included; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder: embeddings, layers of attention and MLP around a residual, a norm, a head.

    Whether there are biases, gates, learned positions or norms of queries and keys is told by the roles that
    its weights have (`DecoderWeights`).
    """

    vocab_size: int
    context_length: int                     # tokens
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attentions: tuple[Attention, ...]       # one per layer
    attention_scale: float                  # of query x key
    attention_softcap: float | None = None  # scores s become cap * tanh(s / cap)
    alibi: bool = False                     # scores fall with the distance, see `alibi_slopes`
    norm: Literal["rms", "layer"]
    norm_epsilon: float
    activation: Activation
    parallel: bool = False                  # attention and MLP read the same residual
    embedding_scale: float | None = None
    logits_softcap: float | None = None
    tied: bool                              # the head is the embedding

    @property
    def dimensions(self) -> Dimensions:
        """What the stages around the graph need to know."""
        return Dimensions(
            num_layers=len(self.attentions),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
        )


def alibi_slopes(num_heads: int) -> FloatArray:
    """How much a head's score falls with each token of distance: [num_heads].

    A geometric series where the number of heads is a power of two; else that of the power below, and every
    second value of the one above.

    Source: Press, Smith and Lewis, "Train Short, Test Long" (2022), and their code for other numbers.
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / below) for i in range(below)]
    between = [2.0 ** (-8 * (i + 0.5) / below) for i in range(num_heads - below)]
    return np.array(slopes + between, np.float32)
