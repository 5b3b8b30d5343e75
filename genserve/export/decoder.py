"""Decoder: describes a decoder-only transformer by sizes and options, without the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from genserve.sampling.logits_array import FloatArray

# relu2 is the square of relu; xielu has parameters, the roles `mlp.alpha_p`, `.alpha_n` and `.beta`;
# clamped_swiglu is that of gpt-oss' experts: min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (1 + up), with up
# limited to [-7, 7].
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "clamped_swiglu"]
# How scores follow from the logits of a router, and weights of the chosen experts from the scores: the
# softmax over all experts; the sigmoid of each; logits of which only the chosen ones become a softmax, or
# sigmoids; or Phi's "SparseMixer", where each of two experts has its softmax over those whose logits are
# close to its own.
Score = Literal["softmax", "sigmoid", "softmax_of_top", "sigmoid_of_top", "sparsemixer"]
NormKind = Literal["rms", "layer"]
# How the state of a head changes with a token, and how its outputs are normed; see `linear_attention.hpp`.
Rule = Literal["gated", "gated_delta"]
OutputNorm = Literal["", "norm_then_gate", "gate_then_norm"]
_STATE_PANEL = 32   # values of a head whose states are stored together
# The sizes of the states that a layer keeps of a sequence, by name.
StateSizes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The keys and values that a layer keeps of a token."""

    layer: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The sizes of a model that the configs of its stages need."""

    num_layers: int
    caches: tuple[Cache, ...]   # of the layers that have one
    vocab_size: int
    context_length: int  # tokens
    states: tuple[tuple[int, str, tuple[int, ...]], ...] = ()   # layer, name and sizes of recurrent states


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary positions, which rotate the first 2 * len(frequencies) numbers of a head in pairs."""

    frequencies: tuple[float, ...]  # radians per position
    scale: float = 1.0              # multiplies cosines and sines
    neighbours: bool = False        # pairs numbers 2i and 2i + 1 instead of i and i + len(frequencies)
    distance: int | None = None     # pairs numbers i and i + this instead of i and i + len(frequencies)

    def tables(self, length: int) -> tuple[FloatArray, FloatArray]:
        """Return cosines and sines of the positions below `length`: [length, len(frequencies)] float32."""
        # The product is float32 as in transformers, or the angles of high positions would differ.
        angles = np.outer(np.arange(length, dtype=np.float32), np.array(self.frequencies, np.float32))
        cosines, sines = np.cos(angles, dtype=np.float64), np.sin(angles, dtype=np.float64)
        return (self.scale * cosines).astype(np.float32), (self.scale * sines).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """A norm of queries and keys, whose weights are [head_dim] or [heads, head_dim]."""

    kind: NormKind = "rms"
    joint: bool = False         # one norm over the numbers of all heads, instead of a norm of each head
    after_rotary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Queries grow with the position p: they are multiplied by 1 + beta * log(1 + (p + first) // length)."""

    beta: float
    length: int     # tokens
    first: int = 0  # the number of the first position

    def table(self, length: int) -> FloatArray:
        """Return the factors of the positions below `length`: [length] float32."""
        spans = (np.arange(length) + self.first) // self.length
        return (1 + self.beta * np.log1p(spans)).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Keys and values that are linear in one vector of a token, which is cached in their place.

    Instead of each head's keys W_k c, a query meets c itself, after its product with the transposed W_k; and
    the weighted sum of vectors c is multiplied by W_v ("absorbed"). So attention has one head of keys, of
    rotary positions and then c. Source: DeepSeek-AI, "DeepSeek-V2" (2024), 2.1.
    """

    rank: int                   # numbers of c
    rope: int                   # numbers of a key with rotary positions, before c
    nope: int                   # numbers of a head's query that meet W_k c
    value: int                  # numbers of a head's values W_v c
    query_rank: int | None      # numbers from which queries are made; None: from the hidden state
    norm_epsilon: float         # of the norms of c and of what queries are made from


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention of a layer; it has biases if the weights have them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float                            # multiplies query x key
    rotary: Rotary | None = None
    window: int | None = None               # number of attended tokens, including the newest; None: all
    chunk: int | None = None                # tokens attend within chunks of this many positions
    softcap: float | None = None            # scores s become cap * tanh(s / cap)
    alibi: bool = False                     # scores decrease with the distance, see `alibi_slopes`
    clip: float | None = None               # queries, keys and values are limited to [-clip, clip], normed
    head_norm: HeadNorm | None = None
    query_scale: QueryScale | None = None
    latent: Latent | None = None
    gated: bool = False                     # the sigmoid of the role `attention.gate` multiplies the outputs
    value_norm: bool = False                # an RMS norm without a weight, of each head of values
    cache_of: int | None = None             # the layer whose keys and values are attended; None: this one


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """A convolution over the last tokens, between two gates: c * conv(b * x)."""

    kernel_size: int    # tokens

    def states(self, hidden_size: int) -> StateSizes:
        """The states of a sequence; `hidden_size` is that of the decoder."""
        return {"conv": (self.kernel_size - 1, hidden_size)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Heads with a state [key_dim, value_dim] in place of a cache, behind a convolution over tokens."""

    rule: Rule
    num_heads: int
    num_key_heads: int          # heads of queries and keys
    key_dim: int
    value_dim: int
    kernel_size: int            # tokens
    norm: OutputNorm
    norm_size: int              # numbers that are normed together
    norm_epsilon: float
    beta_scale: float = 1.0     # multiplies the delta rule's beta, which is below 1
    step_limits: tuple[float, float] = (0.0, float("inf"))

    def states(self, _hidden_size: int) -> StateSizes:
        """The states of a sequence."""
        channels = 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim
        panels = -(-self.value_dim // _STATE_PANEL)
        return {
            "conv": (self.kernel_size - 1, channels),
            "recurrent": (self.num_heads, panels, self.key_dim, _STATE_PANEL),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Consecutive experts form groups, and only those of the best groups can be chosen."""

    count: int
    kept: int           # the best groups
    top: int            # a group's score is the sum of this many of its best scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The choice of experts by their scores, to which the role `mlp.choice` is added for the choice only."""

    score: Score
    groups: Groups | None = None
    normalise: float | None = None      # weights are divided by their sum + this; None: they are not
    scale: float = 1.0                  # multiplies the weights
    jitter: float = 0.0                 # of "sparsemixer": logits within twice this share are close
    scales_inputs: bool = False         # weights multiply what experts read, not what they return


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """MLPs of which each token takes a few."""

    count: int
    top_k: int                  # experts of a token
    router: Router
    shared: bool = False        # whether all tokens take one more, the roles `mlp.shared`
    beside_mlp: bool = False    # whether the layer has an MLP too, whose outputs are added, each normed first


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Parts around a residual, each with norms before or after it, as the weights have them.

    Attention and a mixer with recurrent states read the same residual; the MLP reads their sum with it.
    """

    attention: Attention | None
    activation: Activation | None       # None: there is no MLP
    parallel: bool = False              # attention and MLP read the same residual
    experts: Experts | None = None      # in place of one MLP
    mixer: ShortConv | LinearAttention | None = None
    norms: Literal["before", "after"] | None = None     # of the parts, where layers of the family differ
    # Gates count from so many standard deviations above their mean, as what they exceed it by.
    gate_cutoff: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayer:
    """Numbers of a token for each layer: from a second embedding, plus a normed projection of the first."""

    size: int                   # numbers of a token and layer
    embedding_scale: float
    norm_epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUp:
    """Several streams of hidden states, of which a layer computes the first and predicts the others.

    Source: Baykal et al., "Alternating Updates for Efficient Transformers" (2023).
    """

    num_streams: int
    least: float = 1e-5     # the least mean square of a stream, when it gets the magnitude of the first one


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder: embeddings, layers, a norm, and a head.

    Biases, gates, learned positions and norms before and after attention and MLP exist if the weights have
    tensors for them (the roles of `DecoderWeights`).
    """

    vocab_size: int
    hidden_size: int
    context_length: int                     # tokens
    layers: tuple[Layer, ...]
    norm: NormKind
    norm_epsilon: float                     # of all norms
    embedding_scale: float | None = None
    residual_scale: float = 1.0             # multiplies the outputs of attention and MLP
    logits_scale: float = 1.0
    logits_softcap: float | None = None     # logits s become cap * tanh(s / cap)
    tied: bool                              # the head is the embedding
    per_layer: PerLayer | None = None
    altup: AltUp | None = None
    scales: Mapping[str, float] = field(default_factory=dict)   # of weights and biases of layers, by role

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of the layers that have one."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def has_states(self) -> bool:
        """Whether a layer has recurrent states."""
        return any(layer.mixer is not None for layer in self.layers)

    @property
    def last_writer(self) -> int:
        """The last layer with keys, values or states of its own; those behind it read caches at most."""
        return max(
            index
            for index, layer in enumerate(self.layers)
            if layer.mixer is not None or (layer.attention and layer.attention.cache_of is None)
        )

    @property
    def shares_caches(self) -> bool:
        """Whether a layer attends to the keys and values of an earlier one."""
        return any(attention.cache_of is not None for attention in self.attentions)

    @property
    def kind_of_own_operators(self) -> str | None:
        """What layers have that only genserve's operators in ONNX compute; None: nothing."""
        if self.has_states:
            return "with recurrent states"
        if self.shares_caches:
            return "that share the cache of another layer"
        if any(attention.chunk is not None for attention in self.attentions):
            return "whose tokens attend within chunks"
        if any(attention.value_norm for attention in self.attentions):
            return "that norm their values"
        return None

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The distinct rotary positions of the layers, in order."""
        rotaries = (attention.rotary for attention in self.attentions)
        return tuple(dict.fromkeys(rotary for rotary in rotaries if rotary is not None))

    @property
    def num_experts(self) -> int:
        """The largest number of experts of a layer."""
        return max(layer.experts.count if layer.experts else 0 for layer in self.layers)

    @property
    def dimensions(self) -> Dimensions:
        """The sizes that the configs of the stages need."""
        return Dimensions(
            num_layers=len(self.layers),
            caches=tuple(
                Cache(layer=index, num_kv_heads=attention.num_kv_heads, head_dim=attention.head_dim)
                for index, layer in enumerate(self.layers)
                if (attention := layer.attention) is not None and attention.cache_of is None
            ),
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            states=tuple(
                (index, name, sizes)
                for index, layer in enumerate(self.layers)
                if layer.mixer is not None
                for name, sizes in layer.mixer.states(self.hidden_size).items()
            ),
        )


def alibi_slopes(num_heads: int) -> FloatArray:
    """Return the decrease of each head's score per token of distance: [num_heads] float32.

    The slopes are a geometric series if the number of heads is a power of two. Otherwise they are the series
    of the power of two below, followed by every second value of the series of the power above.

    Source: Press, Smith and Lewis, "Train Short, Test Long" (2022), and their code for other numbers of
        heads.
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / below) for i in range(below)]
    between = [2.0 ** (-8 * (i + 0.5) / below) for i in range(num_heads - below)]
    return np.array(slopes + between, np.float32)
