"""Experts calls: the plain C function through ctypes, and its reference in numpy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.kernels import packing
from tests.kernels import linear_calls
from tests.kernels.c_types import Error, Tensor, Threads, library
from tests.kernels.linear_calls import Layer, make_layer

Array = NDArray[Any]

SCORES = ("softmax", "sigmoid", "softmax_of_top", "sparsemixer", "sigmoid_of_top")
ACTIVATIONS = (*linear_calls.ACTIVATIONS, "clamped_swiglu")
INPUTS = (
    "x", "router_weight", "inner_weight", "down_weight", "inner_scales", "down_scales",
    "norm_weight", "norm_bias", "router_bias", "choice_bias", "inner_bias", "down_bias",
    "shared_inner_weight", "shared_inner_scales", "shared_inner_bias",
    "shared_down_weight", "shared_down_scales", "shared_down_bias", "residual",
    "router_norm_weight", "expert_scales",
)


class RouterAttributes(ctypes.Structure):
    _fields_ = (
        ("num_experts", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("score", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("kept_groups", ctypes.c_int32),
        ("group_top", ctypes.c_int32),
        ("normalise", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("jitter", ctypes.c_float),
    )


class Attributes(ctypes.Structure):
    _fields_ = (
        ("router", RouterAttributes),
        *((name, linear_calls.Attributes) for name in ("inner", "down", "shared_inner", "shared_down")),
        ("shared_score", ctypes.c_int32),
        ("scales_inputs", ctypes.c_int32),
    )


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The choice of experts; see `genserve.export.decoder.Router`."""

    num_experts: int
    top_k: int
    score: str = "softmax"
    groups: tuple[int, int, int] | None = None      # count, kept, top
    normalise: float = -1.0
    scale: float = 1.0
    jitter: float = 0.0
    scales_inputs: bool = False

    def attributes(self) -> RouterAttributes:
        return RouterAttributes(
            self.num_experts, self.top_k, SCORES.index(self.score), *(self.groups or (0, 0, 1)),
            self.normalise, self.scale, self.jitter,
        )

    def weights(self, logits: Array, choice_bias: Array | None) -> Array:
        """The weight of each expert for each row: [T, experts] float64, 0 for those that are not chosen."""
        found = np.zeros(logits.shape)
        for row, own in zip(found, logits.astype(np.float64), strict=True):
            is_mixed = self.score == "sparsemixer"
            chosen, weights = self._mixed(own) if is_mixed else self._best(own, choice_bias)
            row[chosen] = weights * self.scale
        return found

    def _best(self, logits: Array, choice_bias: Array | None) -> tuple[Array, Array]:
        scores = {"softmax": softmax, "sigmoid": sigmoid}.get(self.score, lambda v: v)(logits)
        choice = scores + (0 if choice_bias is None else choice_bias)
        if self.groups is not None:
            count, kept, top = self.groups
            members = choice.reshape(count, -1)
            best = np.sort(members, axis=1)[:, -top:].sum(axis=1)
            left_out = np.argsort(-best, kind="stable")[kept:]
            members = members.copy()
            members[left_out] = -np.inf
            choice = members.ravel()
        chosen = np.argsort(-choice, kind="stable")[: self.top_k]
        weights = scores[chosen]
        if self.score == "softmax_of_top":
            weights = softmax(weights)
        if self.score == "sigmoid_of_top":
            weights = sigmoid(weights)
        return chosen, weights / (weights.sum() + self.normalise) if self.normalise >= 0 else weights

    def _mixed(self, logits: Array) -> tuple[Array, Array]:
        chosen: list[int] = []
        weights = []
        for _ in range(2):
            left = logits.copy()
            left[chosen] = -np.inf
            highest = left.max()
            with np.errstate(invalid="ignore"):     # equal logits of 0 are close
                is_far = (highest - logits) / np.maximum(np.abs(logits), highest) > 2 * self.jitter
            weights.append(softmax(np.where(is_far, -np.inf, left))[left.argmax()])
            chosen.append(int(left.argmax()))
        return np.array(chosen), np.array(weights)


def sigmoid(values: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-values))
    return found


def softmax(values: Array) -> Array:
    powers: Array = np.exp(values - values.max())
    return powers / powers.sum()


@dataclass(kw_only=True)
class Case:
    """Experts with their weights, as layers of which each is one Linear."""

    routing: Routing
    router: Array                   # [experts, hidden], and a row for the shared expert
    inner: list[Layer]
    down: list[Layer]
    norm_weight: Array | None
    router_bias: Array | None
    choice_bias: Array | None
    router_norm: Array | None
    scales: Array | None
    shared: tuple[Layer, Layer] | None
    activation: str

    @property
    def has_score(self) -> bool:
        return len(self.router) > self.routing.num_experts

    def inputs(self) -> dict[str, Array | None]:
        named: dict[str, Array | None] = {
            "router_weight": packing.pack_float32(self.router),
            "norm_weight": self.norm_weight,
            "router_bias": self.router_bias,
            "choice_bias": self.choice_bias,
            "router_norm_weight": self.router_norm,
            "expert_scales": self.scales,
        }
        for name, layers in (("inner", self.inner), ("down", self.down)):
            for part, join in (("weight", np.concatenate), ("scales", np.concatenate), ("bias", np.stack)):
                if part in layers[0].inputs:
                    named[f"{name}_{part}"] = join([layer.inputs[part] for layer in layers])
        for name, layer in zip(("shared_inner", "shared_down"), self.shared or (), strict=False):
            named |= {f"{name}_{part}": layer.inputs.get(part) for part in ("weight", "scales", "bias")}
        return named


def make_case(
    routing: Routing,
    *,
    hidden: int = 70,
    intermediate: int = 45,
    formats: tuple[str, str] = ("int8_block", "int8_block"),
    kinds: tuple[str, str] | None = None,
    norm: str = "rms",
    activation: str = "silu",
    gated: bool = True,
    bias: bool = False,
    biases: bool = False,
    gemma4: bool = False,
    shared: int = 0,
    scored: bool = False,
    seed: int = 0,
) -> Case:
    """Random experts.

    `biases`: the router has a bias, and one for the choice; `gemma4`: it has a norm of its own, and scales.
    """
    rng = np.random.default_rng(seed)

    def pair(inner: int) -> tuple[Layer, Layer]:
        types = [[kind] for kind in kinds] if kinds else [[], []]
        sizes = [(hidden, inner), (inner, hidden)]
        # The activation of the inner layer is that of the experts, and the norm is given with them.
        options: list[dict[str, Any]] = [{"norm": norm, "gated": gated}, {}]
        made = [
            make_layer(
                rng, bias=bias, kinds=kind, in_features=size[0], out_features=size[1],
                weight_format=weight_format, **option,
            )
            for kind, size, weight_format, option in zip(types, sizes, formats, options, strict=True)
        ]
        return made[0], made[1]

    pairs = [pair(intermediate) for _ in range(routing.num_experts)]
    common = pair(shared) if shared else None
    norm_weight = pairs[0][0].inputs.get("norm_weight")
    for inner, _ in [*pairs, *([common] if common else [])]:
        inner.inputs.pop("norm_bias", None)
        inner.activation = activation if activation != "clamped_swiglu" else ""
        if norm_weight is not None:
            inner.inputs["norm_weight"] = norm_weight
    count = routing.num_experts

    def vector() -> Array:
        return rng.standard_normal(count, dtype=np.float32) / 4

    return Case(
        routing=routing,
        router=rng.standard_normal((count + scored, hidden), dtype=np.float32) / np.float32(hidden**0.5),
        inner=[inner for inner, _ in pairs],
        down=[down for _, down in pairs],
        norm_weight=norm_weight,
        router_bias=vector() if biases else None,
        choice_bias=vector() if biases else None,
        router_norm=rng.standard_normal(hidden, dtype=np.float32) if gemma4 else None,
        scales=rng.standard_normal(count, dtype=np.float32) if gemma4 else None,
        shared=common,
        activation=activation,
    )


class ExpertsError(Exception):
    pass


def compute(
    case: Case,
    x: Array,
    residual: Array | None = None,
    *,
    isa: str = "",
    threads: int = 1,
    given: dict[str, Array | None] | None = None,
    routing: RouterAttributes | None = None,
) -> Array:
    """Call genserve_experts; `given` replaces inputs, and `routing` the router's attributes."""
    named = case.inputs() | {"x": x, "residual": residual} | (given or {})
    layers = (case.inner[0], case.down[0], *(case.shared or ()))
    parts = [linear_calls.attributes_of(layer) for layer in layers]
    parts += [linear_calls.Attributes()] * (4 - len(parts))
    parts[0].activation = ACTIVATIONS.index(case.activation)
    router, scales_inputs = routing or case.routing.attributes(), case.routing.scales_inputs
    attributes = Attributes(router, *parts, case.has_score, scales_inputs)
    y, error = np.full_like(x, np.nan), Error()
    y_tensor = Tensor.of(y)
    good = library(isa).genserve_experts(
        ctypes.byref(attributes),
        (Tensor * len(INPUTS))(*(Tensor.of(named.get(name)) for name in INPUTS)),
        ctypes.byref(y_tensor),
        ctypes.byref(Threads.of(threads)),
        ctypes.byref(error),
    )
    if not good:
        raise ExpertsError(error.message.decode())
    return y


def reference(case: Case, x: Array, residual: Array | None = None) -> Array:
    """The outputs of all experts by the operator Linear, added in float64 with numpy's choice."""
    router = Layer(in_features=x.shape[1], out_features=len(case.router), norm=case.inner[0].norm)
    if case.norm_weight is not None:
        router.inputs["norm_weight"] = case.norm_weight if case.router_norm is None else case.router_norm
    all_logits = linear_calls.normed(router, x) @ case.router.T.astype(np.float64)
    logits = all_logits[:, : case.routing.num_experts]
    if case.router_bias is not None:
        logits = logits + case.router_bias
    weights = case.routing.weights(logits, case.choice_bias)
    if case.scales is not None:
        weights = weights * case.scales
    y = np.zeros(x.shape) if residual is None else residual.astype(np.float64)
    if case.shared:
        outputs = linear_calls.compute(case.shared[1], linear_calls.compute(case.shared[0], x))
        y = y + outputs * (1 / (1 + np.exp(-all_logits[:, -1:])) if case.has_score else 1)
    for expert, (inner, down) in enumerate(zip(case.inner, case.down, strict=True)):
        own = weights[:, expert : expert + 1]
        if case.routing.scales_inputs:
            y = y + linear_calls.compute(down, _scaled_inner(inner, x, own.astype(np.float32)))
        else:
            y = y + own * linear_calls.compute(down, _inner(case, inner, x))
    return y


def _scaled_inner(inner: Layer, x: Array, weights: Array) -> Array:
    """What a gated expert without biases expands from rows that its weights multiply."""
    rows, _ = linear_calls.rounded(inner, linear_calls.normed(inner, x))
    gate, up = np.split(weights * (rows @ inner.weight.T), 2, axis=1)
    values: Array = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
    return values


def _inner(case: Case, inner: Layer, x: Array) -> Array:
    if case.activation != "clamped_swiglu":
        return linear_calls.compute(inner, x)
    rows, _ = linear_calls.rounded(inner, linear_calls.normed(inner, x))
    gate, up = np.split(rows @ inner.weight.T + inner.inputs.get("bias", 0), 2, axis=1)
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    values: Array = (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)).astype(np.float32)
    return values
