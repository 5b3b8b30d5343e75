"""Layers: writes the layers of a graph that have weights: embedding, linear layers, head and norms.

`decoder_graph.py` writes a model through `Layers`. `FusedLayers` writes custom operators for the CPU;
`StandardLayers` writes operators of ONNX, which also run on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from genserve.errors import ExportError
from genserve.export.checkpoints.rows import Rows
from genserve.export.checkpoints.stored_weight import StoredWeight
from genserve.export.decoder import Activation, Experts
from genserve.export.graphs.onnx_graph import OnnxGraphBuilder
from genserve.export.quantization import QuantizationScheme
from genserve.kernels.packing import WeightFormat, pack_float32, pack_quantized, quantize
from genserve.sampling.logits_array import FloatArray

# The field of `QuantizationScheme` for the weight; "exact": it has the type of the activations.
LinearKind = Literal["normed", "inner", "head", "exact"]

_QUANTIZED = ("embedding", "embedding.scales")    # the names of an embedding that an export quantizes

# The inputs of a graph that describe its sequences, in the order in which the operators have them.
SEQUENCE_INPUTS = ("cumulative_sequence_length", "past_seqlens", "block_table")

# The activations that genserve's operators compute at their end; others are an operator behind them.
KERNEL_ACTIVATIONS: tuple[Activation | None, ...] = (None, "silu", "gelu", "gelu_tanh", "relu", "relu2")

# `Layers.activated` computes the activations of an MLP, and that of attention's gates.
Elementwise = Activation | Literal["sigmoid"]

# The attributes of DecoderLayer for the formats of qkv, output, inner and down.
_FORMAT_ATTRIBUTES = (
    "weight_format", "residual_weight_format", "inner_weight_format", "down_weight_format"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm of rows [columns], or of each of several groups of their columns."""

    name: str
    kind: Literal["rms", "layer"]
    epsilon: float
    weight: FloatArray                      # [columns / num_groups] or [num_groups, columns / num_groups]
    bias: FloatArray | None                 # [columns / num_groups]; None if each group has its own weight
    num_groups: int = 1                     # of columns, each normed by itself, such as heads
    smoothing: FloatArray | None = None     # the factors by which its outputs were divided


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear layer: `activation(norm(x) @ weight.T + bias) + residual`, of rows x [rows, K]."""

    x: str                                  # a value [rows, K]
    weight: Rows[np.float32] | StoredWeight     # [N, K]
    output: str                             # the name of the result [rows, N]; prefix of its weights
    kind: LinearKind                        # selects the number format of the weight
    bias: FloatArray | None = None          # [N]
    xielu: FloatArray | None = None         # [3]: alpha_p, alpha_n and beta, if `activation` is "xielu"
    norm: Norm | None = None                # applied to the rows of x first
    activation: Activation | None = None    # applied to the outputs
    gated: bool = False                     # the activated first half times the second half: [rows, N / 2]
    residual: str = ""                      # a value [rows, N]
    softcap: float | None = None            # outputs s become softcap * tanh(s / softcap)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """A layer of a decoder: attention and MLP, with norms before them and residuals around them."""

    x: str                      # a value [num_tokens, hidden]
    linears: Iterable[Linear]   # qkv, output, inner and down
    past: Sequence[str]         # the layer's buffers in the KV cache: keys, values, in int8 also their scales
    present: Sequence[str]      # the same, after the layer
    constants: Sequence[str]    # cosines, sines, norms of queries and keys, ALiBi's slopes; "": none
    attributes: Mapping[str, float | str]   # the operator's attributes, except those for the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsLayer:
    """Experts: `residual + the sum of weight * expert(norm(x))` over the experts that a row chooses."""

    x: str                                  # a value [rows, hidden]
    output: str                             # the name of the result [rows, hidden]; prefix of the weights
    described: Experts
    activation: Activation
    inner: Callable[[int], Linear]          # of an expert, with its bias, if any
    down: Callable[[int], Linear]
    router: FloatArray                      # [experts, hidden], and a row for the score of the shared expert
    router_bias: FloatArray | None
    choice_bias: FloatArray | None
    shared: tuple[Linear, Linear] | None    # inner and down of the expert of all rows
    norm: Norm | None
    residual: str                           # "": none
    router_norm: FloatArray | None = None   # [hidden]: the weight of the router's norm, if it has its own
    scales: FloatArray | None = None        # [experts]: multiply the weights of chosen experts


@dataclass(frozen=True, slots=True)
class Layers(ABC):
    """Adds layers to a graph; every method returns the name of the value that it adds."""

    graph: OnnxGraphBuilder
    scheme: QuantizationScheme

    has_decoder_layers: ClassVar[bool] = False     # whether `decoder_layer` is implemented

    def vector(self, name: str, value: FloatArray) -> str:
        """Add the weight of a norm, a bias or a table, in the type of the activations."""
        return self.graph.weight(name, value.astype(self.scheme.activations))

    @abstractmethod
    def norm(self, x: str, norm: Norm, *, residual: str = "") -> str:
        """Add a norm of rows, plus a residual; its value is named like the norm without a residual."""

    def rows(self, name: str, weight: Rows[np.float32]) -> str:
        """Add a matrix, in the type of the activations."""
        dtype = self.scheme.activations
        return self.graph.weights([name], (partial(_converted, part, dtype) for part in weight.parts()))[0]

    def embedding(
        self, ids: str, weight: Rows[np.float32] | StoredWeight, output: str, *, name: str = "embedding"
    ) -> str:
        """Add the lookup of token ids [num_tokens] in a weight [vocab, n], by its name: [num_tokens, n]."""
        assert not isinstance(weight, StoredWeight)
        return self.graph.node("Gather", [self.rows(name, weight), ids], output)

    @abstractmethod
    def activated(
        self,
        x: str,
        activation: Elementwise,
        *,
        factor: str = "",
        xielu: FloatArray | None = None,
    ) -> str:
        """Add an activation of a value, times another value of its shape; `xielu`: as in `Linear`."""

    @abstractmethod
    def linear(self, layer: Linear) -> str:
        """Add a linear layer."""

    def means(self, x: str, name: str, size: int) -> str:
        """Add the means [rows, 1] of rows [rows, size], as a product: ONNX's bits depend on the batch."""
        weight = Rows.of(np.full((1, size), 1 / size, np.float32))
        return self.linear(Linear(x=x, weight=weight, output=name, kind="exact"))

    def decoder_layer(self, layer: DecoderLayer) -> str:
        """Add a layer of a decoder as one operator; its value is named like the output of `down`."""
        raise NotImplementedError

    def experts(self, layer: ExpertsLayer) -> str:
        """Add experts as one operator."""
        raise NotImplementedError

    def grouped_linear(self, groups: Sequence[Linear]) -> str:
        """Add linear layers of equal sizes, each of which reads its share of the columns of x, as one.

        Their names and options are those of the first; none has a bias, norm, activation or residual.
        """
        raise NotImplementedError

    @abstractmethod
    def head(self, layer: Linear, *, tied: bool) -> str:
        """Add the head, which yields the logits [rows, vocab] float32; `tied`: it shares the embedding."""


@dataclass(frozen=True, slots=True)
class StandardLayers(Layers):
    """Layers with weights in the type of the activations; a tied head is stored once."""

    def norm(self, x: str, norm: Norm, *, residual: str = "") -> str:
        """See `Layers.norm`."""
        node, name, groups = self.graph.node, norm.name, norm.num_groups
        if groups > 1:
            shape = self.graph.constant(f"{name}.shape", np.array([0, groups, -1]))
            x = node("Reshape", [x, shape], f"{name}.groups")
        op = "SimplifiedLayerNormalization" if norm.kind == "rms" else "LayerNormalization"
        # ONNX has one weight for all groups; weights of each group are multiplied afterwards.
        weight = norm.weight if norm.weight.ndim == 1 else np.ones(norm.weight.shape[1], np.float32)
        inputs = [x, self.vector(f"{name}.weight", weight)]
        if norm.bias is not None:
            inputs.append(self.vector(f"{name}.bias", norm.bias))
        x = node(op, inputs, name, epsilon=norm.epsilon)
        if norm.weight.ndim == 2:
            x = node("Mul", [x, self.vector(f"{name}.weights", norm.weight)], f"{name}.weighted")
        if groups > 1:
            flat = self.graph.constant(f"{name}.flat", np.array([0, -1]))
            x = node("Reshape", [x, flat], f"{name}.rows")
        return node("Add", [x, residual], f"{name}.sum") if residual else x

    def activated(
        self,
        x: str,
        activation: Elementwise,
        *,
        factor: str = "",
        xielu: FloatArray | None = None,
    ) -> str:
        """See `Layers.activated`."""
        y = self._activated(x, activation, xielu)
        return self.graph.node("Mul", [y, factor], f"{x}.gated") if factor else y

    def _activated(self, x: str, activation: Elementwise, xielu: FloatArray | None) -> str:
        node = self.graph.node
        match activation:
            case "silu":
                return node("Mul", [x, self._activated(x, "sigmoid", None)], f"{x}.silu")
            case "sigmoid":
                return node("Sigmoid", [x], f"{x}.sigmoid")
            case "gelu":
                return node("Gelu", [x], f"{x}.gelu")
            case "gelu_tanh":
                return node("Gelu", [x], f"{x}.gelu", approximate="tanh")
            case "relu":
                return node("Relu", [x], f"{x}.relu")
            case "relu2":
                positive = node("Relu", [x], f"{x}.relu")
                return node("Mul", [positive, positive], f"{x}.relu2")
        assert activation == "xielu"
        assert xielu is not None
        return self._xielu(x, xielu)

    def _xielu(self, x: str, parameters: FloatArray) -> str:
        """alpha_p * x^2 + beta * x above 0, and alpha_n * (exp(x) - 1 - x) + beta * x below.

        Source: Huang and Schlag, "Deriving Activation Functions Using Integration" (2024).
        """
        node = self.graph.node
        values = zip(("alpha_p", "alpha_n", "beta", "one"), (*parameters, 1), strict=True)
        above, below, slope, one = (
            self.vector(f"{x}.{name}", np.array(value, np.float32)) for name, value in values
        )
        positive = node("Relu", [x], f"{x}.positive")
        negative = node("Sub", [x, positive], f"{x}.negative")
        square = node("Mul", [node("Mul", [positive, positive], f"{x}.square"), above], f"{x}.above")
        # Elu would do, but its bits depend on where a number is in the batch.
        power = node("Sub", [node("Exp", [negative], f"{x}.exp"), one], f"{x}.expm1")
        curve = node("Mul", [node("Sub", [power, negative], f"{x}.curve"), below], f"{x}.below")
        line = node("Mul", [x, slope], f"{x}.line")
        return node("Add", [node("Add", [square, curve], f"{x}.bent"), line], f"{x}.xielu")

    def linear(self, layer: Linear) -> str:
        """See `Layers.linear`."""
        x, output = layer.x, layer.output
        assert not isinstance(layer.weight, StoredWeight)
        if layer.norm:
            x = self.norm(x, layer.norm)
        matrix = self.graph.weight(f"{output}.weight", self._transposed(layer.weight))
        x = self.graph.node("MatMul", [x, matrix], f"{output}.product")
        if layer.bias is not None:
            x = self.graph.node("Add", [x, self.vector(f"{output}.bias", layer.bias)], f"{output}.biased")
        if layer.gated:
            assert layer.activation
            gate, up = f"{output}.gate", f"{output}.up"
            self.graph.node("Split", [x], gate, up, axis=-1, num_outputs=2)
            x = self.activated(gate, layer.activation, factor=up)
        elif layer.activation:
            x = self.activated(x, layer.activation, xielu=layer.xielu)
        if layer.residual:
            x = self.graph.node("Add", [x, layer.residual], f"{output}.sum")
        return x

    def head(self, layer: Linear, *, tied: bool) -> str:
        """See `Layers.head`."""
        assert layer.norm
        assert not isinstance(layer.weight, StoredWeight)
        output, softcap = layer.output, layer.softcap
        matrix = "embedding" if tied else self.rows("head", layer.weight)
        x = self.norm(layer.x, layer.norm)
        biases = [] if layer.bias is None else [self.vector(f"{output}.bias", layer.bias)]
        x = self.graph.node("Gemm", [x, matrix, *biases], f"{output}.product", transB=1)
        x = self.graph.node("Cast", [x], output if softcap is None else f"{output}.uncapped", to=1)
        if softcap is None:
            return x
        limit = self.graph.constant(f"{output}.cap", np.array(softcap, np.float32))
        x = self.graph.node("Div", [x, limit], f"{output}.scaled")
        x = self.graph.node("Tanh", [x], f"{output}.tanh")
        return self.graph.node("Mul", [x, limit], output)

    def _transposed(self, weight: Rows[np.float32]) -> NDArray[Any]:
        matrix = np.empty(weight.shape[::-1], self.scheme.activations)
        start = 0
        for part in weight.parts():
            matrix[:, start : start + len(part)] = part.T
            start += len(part)
        return matrix


@dataclass(frozen=True, slots=True)
class FusedLayers(Layers):
    """Layers of genserve's operators, with float32 activations and packed weights.

    A quantized embedding is read from the panels of its tied head.
    """

    has_decoder_layers: ClassVar[bool] = True

    def norm(self, x: str, norm: Norm, *, residual: str = "") -> str:
        """See `Layers.norm`."""
        return self.graph.node(
            "Norm",
            [x, *self._norm_weights(norm), residual],
            self.graph.value(f"{norm.name}.sum" if residual else norm.name, np.float32),
            norm=norm.kind,
            epsilon=norm.epsilon,
            num_groups=norm.num_groups,
        )

    def activated(
        self,
        x: str,
        activation: Elementwise,
        *,
        factor: str = "",
        xielu: FloatArray | None = None,
    ) -> str:
        """See `Layers.activated`."""
        parameters: dict[str, float] = {}
        if activation == "xielu":
            assert xielu is not None
            parameters = dict(zip(("alpha_p", "alpha_n", "beta"), xielu.tolist(), strict=True))
        return self.graph.node(
            "Activation",
            [x, factor],
            self.graph.value(f"{x}.gated" if factor else f"{x}.{activation}", np.float32),
            activation=activation,
            **parameters,
        )

    def embedding(
        self, ids: str, weight: Rows[np.float32] | StoredWeight, output: str, *, name: str = "embedding"
    ) -> str:
        """See `Layers.embedding`."""
        weight_format = self.scheme.embedding
        if isinstance(weight, StoredWeight):
            if weight.order is not None:
                raise ExportError(
                    f"the {name} is quantized with its inputs in another order",
                    remedy="write --precision int8",
                )
            names = self.graph.weights([name], weight.panels(f"the {name}"))
        elif weight_format is None:
            return Layers.embedding(self, ids, weight, output, name=name)
        else:
            pack = partial(_packed, weight_format=weight_format, gated=False)
            parts = (partial(pack, part) for part in weight.parts())
            names = self.graph.weights([name, f"{name}.scales"], parts)
        return self.graph.node(
            "Embedding",
            [ids, *names],
            self.graph.value(output, np.float32),
            out_features=weight.shape[0],
            in_features=weight.shape[1],
            weight_format=weight.weight_format if isinstance(weight, StoredWeight) else weight_format,
        )

    def linear(self, layer: Linear) -> str:
        """See `Layers.linear`."""
        return self._linear(layer, self._weights(layer))

    def _linear(self, layer: Linear, weights: Sequence[str]) -> str:
        """Add the node of a linear layer, whose weight, scales and bias have these names."""
        norm, is_known = layer.norm, layer.activation in KERNEL_ACTIVATIONS
        assert is_known or not layer.gated, layer.activation
        self.graph.node(
            "Linear",
            [layer.x, *weights, *self._norm_weights(norm), layer.residual, self._order(layer)],
            self.graph.value(layer.output, np.float32),
            out_features=layer.weight.shape[0],
            in_features=layer.weight.shape[1],
            weight_format=self._format(layer),
            activation=layer.activation if layer.activation and is_known else "",
            gated=int(layer.gated),
            softcap=layer.softcap or 0.0,
            **({"norm": norm.kind, "epsilon": norm.epsilon} if norm else {}),
            **self._smoothing(layer, "smoothing"),
        )
        if layer.activation is None or is_known:
            return layer.output
        return self.activated(layer.output, layer.activation, xielu=layer.xielu)

    def decoder_layer(self, layer: DecoderLayer) -> str:
        """See `Layers.decoder_layer`."""
        inputs = [layer.x, *layer.past[:2], *SEQUENCE_INPUTS, *(layer.past[2:] or ["", ""])]
        norms: list[str] = []
        smoothing: dict[str, list[float]] = {}
        formats: list[str] = []
        orders: list[str] = []
        for linear in layer.linears:
            inputs += self._weights(linear)
            formats.append(self._format(linear))
            orders.append(self._order(linear))
            if linear.norm:
                smoothing |= self._smoothing(linear, ("mlp" if norms else "attention") + "_smoothing")
                norms += self._norm_weights(linear.norm)
        hidden_size, intermediate_size = linear.weight.shape    # the last layer is down
        return self.graph.node(
            "DecoderLayer",
            [*inputs, *norms, *layer.constants, *orders],
            self.graph.value(linear.output, np.float32),
            *layer.present,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            **dict(zip(_FORMAT_ATTRIBUTES, formats, strict=True)),
            **layer.attributes,
            **smoothing,
        )

    def experts(self, layer: ExpertsLayer) -> str:
        """See `Layers.experts`."""
        name, described, router = layer.output, layer.described, layer.described.router
        first = layer.inner(0), layer.down(0)
        inner = self._expert_weights(layer.inner, described.count)
        down = self._expert_weights(layer.down, described.count)
        router_weight = self.graph.weight(f"{name}.router.weight", pack_float32(layer.router))
        for linear in layer.shared or ():
            _require_no_order(linear)
        shared = [self._weights(linear) for linear in layer.shared or ()] or [["", "", ""]] * 2
        biases = [
            "" if bias is None else self.vector(f"{name}.{part}", bias)
            for part, bias in (("router.bias", layer.router_bias), ("choice", layer.choice_bias))
        ]
        optional: dict[str, float | str] = {}
        if (groups := router.groups) is not None:
            optional |= {"num_groups": groups.count, "kept_groups": groups.kept, "group_top": groups.top}
        if layer.norm:
            optional |= {"norm": layer.norm.kind, "epsilon": layer.norm.epsilon}
        if layer.shared:
            optional |= {
                "shared_size": layer.shared[1].weight.shape[1],
                "shared_score": int(len(layer.router) > described.count),
                "shared_weight_format": self._format(layer.shared[0]),
                "shared_down_weight_format": self._format(layer.shared[1]),
            }
        own = [
            "" if vector is None else self.vector(f"{name}.{part}", vector)
            for part, vector in (("router_norm", layer.router_norm), ("scales", layer.scales))
        ]
        self.graph.node(
            "Experts",
            [
                layer.x, router_weight, inner[0], down[0], inner[1], down[1], *self._norm_weights(layer.norm),
                *biases, inner[2], down[2], *shared[0], *shared[1], layer.residual, *own,
            ],
            self.graph.value(name, np.float32),
            num_experts=described.count,
            top_k=described.top_k,
            score=router.score,
            scale=router.scale,
            normalise=-1.0 if router.normalise is None else router.normalise,
            jitter=router.jitter,
            scales_inputs=int(router.scales_inputs),
            hidden_size=layer.router.shape[1],
            intermediate_size=first[1].weight.shape[1],
            weight_format=self._format(first[0]),
            down_weight_format=self._format(first[1]),
            activation=layer.activation,
            gated=int(first[0].gated),
            **optional,
        )
        return name

    def grouped_linear(self, groups: Sequence[Linear]) -> str:
        """See `Layers.grouped_linear`."""
        first = groups[0]
        weight, scales, _ = self._stacked_weights(groups)
        out_features, in_features = first.weight.shape
        return self.graph.node(
            "GroupedLinear",
            [first.x, weight, scales],
            self.graph.value(first.output, np.float32),
            num_groups=len(groups),
            in_features=in_features,
            out_features=out_features,
            weight_format=self._format(first),
        )

    def _expert_weights(self, load: Callable[[int], Linear], count: int) -> list[str]:
        return self._stacked_weights([load(index) for index in range(count)])

    def _stacked_weights(self, layers: Sequence[Linear]) -> list[str]:
        """Add the weights of several layers, one after the other, as those of one linear layer."""
        first = layers[0]
        for layer in layers:
            _require_no_order(layer)
        if any(self._format(layer) != self._format(first) for layer in layers):
            raise ExportError(
                f"the weights of {first.output} have different formats",
                remedy="write --precision int8 or --precision int4",
            )
        names = self.graph.weights(
            self._weight_names(first), (part for layer in layers for part in self._parts(layer))
        )
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = self.vector(f"{first.output}.bias", np.stack(biases)) if biases else ""
        return [*names, *[""] * (2 - len(names)), bias]

    def head(self, layer: Linear, *, tied: bool) -> str:
        """See `Layers.head`."""
        if tied and isinstance(layer.weight, StoredWeight):
            return self._linear(layer, ["embedding", "", self._bias(layer)])
        if tied and self.scheme.embedding is not None:
            return self._linear(layer, [*_QUANTIZED, self._bias(layer)])
        return self.linear(layer)

    def _norm_weights(self, norm: Norm | None) -> list[str]:
        if norm is None:
            return ["", ""]

        def vector(name: str, value: FloatArray) -> str:
            """The vector of all columns."""
            of_groups = np.broadcast_to(value, (norm.num_groups, value.shape[-1]))
            return self.vector(f"{norm.name}.{name}", of_groups.ravel())

        return [vector("weight", norm.weight), "" if norm.bias is None else vector("bias", norm.bias)]

    def _smoothing(self, layer: Linear, name: str) -> dict[str, list[float]]:
        """The attribute with the factors that the layer's inputs are to be multiplied by for an adapter.

        No operator reads it. In int8 every layer behind a norm but the head has it.
        """
        if layer.norm is None or layer.kind == "head" or self._format(layer) != "int8":
            return {}
        factors = layer.norm.smoothing
        return {name: np.ones(layer.weight.shape[1]).tolist() if factors is None else factors.tolist()}

    def _format(self, layer: Linear) -> str:
        """The attribute weight_format."""
        if isinstance(layer.weight, StoredWeight):
            return layer.weight.weight_format
        return self._own_format(layer) or "float32"

    def _own_format(self, layer: Linear) -> WeightFormat | None:
        if layer.kind == "exact":
            return None
        weight_format: WeightFormat | None = getattr(self.scheme, layer.kind)
        return weight_format

    def _weights(self, layer: Linear) -> list[str]:
        """Add the packed weight [N, K], its scales if they are a tensor of their own, and the bias."""
        names = self.graph.weights(self._weight_names(layer), self._parts(layer))
        return [*names, *[""] * (2 - len(names)), self._bias(layer)]

    def _weight_names(self, layer: Linear) -> list[str]:
        name = f"{layer.output}.weight"
        has_scales = not isinstance(layer.weight, StoredWeight) and self._own_format(layer) is not None
        return [name, f"{name}.scales"] if has_scales else [name]

    def _parts(self, layer: Linear) -> Iterator[Callable[[], Sequence[NDArray[Any]]]]:
        """Yield functions that return the next panels, and their scales if they are a tensor of their own."""
        weight, gated = layer.weight, layer.gated
        if isinstance(weight, StoredWeight):
            yield from weight.panels(f"{layer.output}.weight", gated=gated)
        else:
            pack = partial(_packed, weight_format=self._own_format(layer), gated=gated)
            yield from (partial(pack, part) for part in weight.parts(gated=gated))

    def _order(self, layer: Linear) -> str:
        """Add the order of the inputs in which a stored weight has them."""
        order = layer.weight.order if isinstance(layer.weight, StoredWeight) else None
        return "" if order is None else self.graph.weight(f"{layer.output}.order", order)

    def _bias(self, layer: Linear) -> str:
        return "" if layer.bias is None else self.vector(f"{layer.output}.bias", layer.bias)


def _require_no_order(layer: Linear) -> None:
    """Reject a weight whose inputs have an order of their own, which only `genserve.Linear` applies."""
    if isinstance(layer.weight, StoredWeight) and layer.weight.order is not None:
        raise ExportError(
            f"{layer.output} has the inputs of its weight in another order (GPTQ's desc_act), which "
            "experts cannot have",
            remedy="write --precision int8 or --precision int4",
        )


def _converted(part: FloatArray, dtype: type[np.generic]) -> list[NDArray[Any]]:
    return [part.astype(dtype)]


def _packed(part: FloatArray, *, weight_format: WeightFormat | None, gated: bool) -> Sequence[NDArray[Any]]:
    if weight_format is None:
        return [pack_float32(part, gated=gated)]
    return pack_quantized(quantize(part, weight_format), weight_format, gated=gated)
