"""Decoder: the description of a decoder-only transformer: sizes and options, without the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from genserve.sampling.logits_array import FloatArray

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The sizes of a model that the configs of its stages need."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary positions: rotate the first 2 * len(frequencies) numbers of a head, paired by halves."""

    frequencies: tuple[float, ...]  # radians per position
    scale: float = 1.0              # of cosines and sines

    def tables(self, length: int) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines of the positions below `length`, each [length, len(frequencies)] float32."""
        # The product is in float32 as in transformers, or the angles of high positions would differ.
        angles = np.outer(np.arange(length, dtype=np.float32), np.array(self.frequencies, np.float32))
        cosines, sines = np.cos(angles, dtype=np.float64), np.sin(angles, dtype=np.float64)
        return (self.scale * cosines).astype(np.float32), (self.scale * sines).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The options of attention that may differ between layers."""

    rotary: Rotary | None = None
    window: int | None = None  # number of attended tokens, including the newest; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder: embeddings, layers of attention and MLP around a residual, a norm, a head.

    Biases, gates, learned positions and norms of queries and keys are present if the weights have those roles
    (`DecoderWeights`).
    """

    vocab_size: int
    context_length: int                     # tokens
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attentions: tuple[Attention, ...]       # one per layer
    attention_scale: float                  # of query x key
    attention_softcap: float | None = None  # scores s become cap * tanh(s / cap)
    alibi: bool = False                     # scores decrease with the distance, see `alibi_slopes`
    norm: Literal["rms", "layer"]
    norm_epsilon: float
    activation: Activation
    parallel: bool = False                  # attention and MLP read the same residual
    embedding_scale: float | None = None
    logits_softcap: float | None = None
    tied: bool                              # the head is the embedding

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The distinct rotary positions of the layers, in order."""
        rotaries = (attention.rotary for attention in self.attentions)
        return tuple(dict.fromkeys(rotary for rotary in rotaries if rotary is not None))

    @property
    def dimensions(self) -> Dimensions:
        """The sizes that the configs of the stages need."""
        return Dimensions(
            num_layers=len(self.attentions),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
        )


def alibi_slopes(num_heads: int) -> FloatArray:
    """Return the decrease of each head's score per token of distance: [num_heads] float32.

    A geometric series if the number of heads is a power of two; otherwise that of the power below, followed
    by every second value of the series of the power above.

    Source: Press, Smith and Lewis, "Train Short, Test Long" (2022), and their code for other numbers.
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / below) for i in range(below)]
    between = [2.0 ** (-8 * (i + 0.5) / below) for i in range(num_heads - below)]
    return np.array(slopes + between, np.float32)
