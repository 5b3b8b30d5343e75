"""State calls: the operators with states through ctypes, and their references in numpy, token by token."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.c_types import Error, Tensor, Threads, library

Array = NDArray[Any]

STATE_INPUTS = ("cumulative_sequence_length", "state_source", "state_target", "past_state")
CONV_INPUTS = ("x", "weight", "bias", *STATE_INPUTS)
ATTENTION_INPUTS = ("x", "gates", "rate", "step_bias", "skip", "norm_weight", *STATE_INPUTS)
RULES = ("gated", "gated_delta")
NORMS = ("", "norm_then_gate", "gate_then_norm")
PANEL = 32
ZERO = -1       # the source of a sequence without earlier tokens


class StateError(Exception):
    """The operator has rejected its inputs."""


@dataclass(kw_only=True)
class Rows:
    """The rows of a batch: how many tokens each has, and the slots that it reads and writes."""

    lengths: Sequence[int]
    sources: Sequence[int]
    targets: Sequence[int]

    def inputs(self) -> dict[str, Array]:
        return {
            "cumulative_sequence_length": np.cumsum([0, *self.lengths], dtype=np.int32),
            "state_source": np.array(self.sources, np.int32),
            "state_target": np.array(self.targets, np.int32),
        }

    def parts(self) -> Iterator[tuple[slice, int, int]]:
        ends = np.cumsum(self.lengths).tolist()
        for length, end, source, target in zip(self.lengths, ends, self.sources, self.targets, strict=True):
            yield slice(end - length, end), source, target


def _structure(names: Sequence[str]) -> type[ctypes.Structure]:
    return type("Inputs", (ctypes.Structure,), {"_fields_": [(name, Tensor) for name in names]})


_CONV_STRUCTURE, _ATTENTION_STRUCTURE = _structure(CONV_INPUTS), _structure(ATTENTION_INPUTS)


class ConvAttributes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("channels", "kernel_size", "offset")),
        *((name, ctypes.c_int32) for name in ("gated", "silu")),
    )


class AttentionAttributes(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_key_heads", "num_heads", "key_dim", "value_dim", "norm_size",
                "gate_offset", "step_offset", "beta_offset",
            )
        ),
        *((name, ctypes.c_int32) for name in ("rule", "norm")),
        *((name, ctypes.c_float) for name in ("epsilon", "beta_scale", "step_min", "step_max")),
    )


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


@dataclass(kw_only=True)
class Conv:
    """A CausalConv with its weights; `silu` is its activation."""

    channels: int = 70
    kernel_size: int = 4
    offset: int = 0
    gated: bool = False
    silu: bool = False
    has_bias: bool = True
    weights: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(3)
        shapes = {"weight": (self.kernel_size, self.channels), "bias": (self.channels,)}
        for name, shape in shapes.items():
            if name != "bias" or self.has_bias:
                self.weights[name] = generator.standard_normal(shape, dtype=np.float32)

    @property
    def columns(self) -> int:
        return self.offset + (3 if self.gated else 1) * self.channels + 5

    def states(self, count: int) -> Array:
        return _random((count, self.kernel_size - 1, self.channels), seed=4)

    def rows(self, count: int) -> dict[str, Array]:
        return {"x": _random((count, self.columns), seed=5)}

    def compute(self, inputs: dict[str, Array], rows: Rows, states: Array, **options: Any) -> Array:
        """The outputs; the states are written in place."""
        attributes = ConvAttributes(self.channels, self.kernel_size, self.offset, self.gated, self.silu)
        tensors = {**inputs, **self.weights, **rows.inputs(), "past_state": states}
        y = np.full((len(inputs["x"]), self.channels), np.nan, np.float32)
        return _call("causal_conv", attributes, _CONV_STRUCTURE, tensors, y, **options)

    def reference(self, inputs: dict[str, Array], rows: Rows, states: Array) -> tuple[Array, Array]:
        """The outputs and the new states, in float64."""
        found, after = np.zeros((len(inputs["x"]), self.channels)), states.astype(np.float64)
        weight = self.weights["weight"].astype(np.float64)
        for tokens, source, target in rows.parts():
            x = inputs["x"][tokens, self.offset :].astype(np.float64)
            parts = x[:, : 3 * self.channels].reshape(len(x), 3, -1) if self.gated else None
            u = x[:, : self.channels] if parts is None else parts[:, 0] * parts[:, 2]
            before = np.zeros(states.shape[1:]) if source == ZERO else states[source]
            history = np.concatenate([before, u])
            y = sum(weight[j] * history[j : j + len(u)] for j in range(self.kernel_size))
            y = y + self.weights.get("bias", np.zeros(1))
            y = _silu(y) if self.silu else y
            found[tokens] = y if parts is None else y * parts[:, 1]
            after[target] = history[len(u) :]
        return found, after


@dataclass(kw_only=True)
class Attention:
    """A LinearAttention with its weights."""

    rule: str = "gated_delta"
    norm: str = "norm_then_gate"
    num_key_heads: int = 2
    num_heads: int = 4
    key_dim: int = 20
    value_dim: int = 40
    norm_size: int = 40
    beta_scale: float = 1.0
    limits: tuple[float, float] = (0.0, float("inf"))
    weights: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        heads = self.num_heads
        self.weights = {
            "rate": np.exp(_random((heads,), seed=6)),
            "step_bias": _random((heads,), seed=7),
            "norm_weight": 1 + _random((heads * self.value_dim,), seed=8) / 5,
        }
        if self.rule == "gated":
            self.weights["skip"] = _random((heads,), seed=9)

    @property
    def offsets(self) -> tuple[int, int, int]:
        """The columns of the gate, the steps and beta."""
        values = self.num_heads * self.value_dim
        return 3, 3 + values, 3 + values + self.num_heads

    def states(self, count: int) -> Array:
        shape = (count, self.num_heads, -(-self.value_dim // PANEL), self.key_dim, PANEL)
        states = _random(shape, seed=10)
        states[..., -1, :, self.value_dim % PANEL or PANEL :] = 0
        return states

    def rows(self, count: int) -> dict[str, Array]:
        width = 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim
        return {
            "x": _random((count, width), seed=11),
            "gates": _random((count, self.offsets[2] + self.num_heads + 2), seed=12),
        }

    def compute(self, inputs: dict[str, Array], rows: Rows, states: Array, **options: Any) -> Array:
        """The outputs; the states are written in place."""
        attributes = AttentionAttributes(
            self.num_key_heads, self.num_heads, self.key_dim, self.value_dim, self.norm_size, *self.offsets,
            RULES.index(self.rule), NORMS.index(self.norm), 1e-5, self.beta_scale, *self.limits,
        )
        tensors = {**inputs, **self.weights, **rows.inputs(), "past_state": states}
        y = np.full((len(inputs["x"]), self.num_heads * self.value_dim), np.nan, np.float32)
        return _call("linear_attention", attributes, _ATTENTION_STRUCTURE, tensors, y, **options)

    def reference(self, inputs: dict[str, Array], rows: Rows, states: Array) -> tuple[Array, Array]:
        """The outputs and the new states, in float64."""
        x, gates = (inputs[name].astype(np.float64) for name in ("x", "gates"))
        heads, keys = self.num_heads, self.num_key_heads * self.key_dim
        z, steps, betas = (gates[:, offset:] for offset in self.offsets)
        found, after = np.zeros((len(x), heads * self.value_dim)), states.astype(np.float64)
        for tokens, source, target in rows.parts():
            state = np.zeros((heads, self.key_dim, self.value_dim))
            if source != ZERO:
                state = self.unpacked(states[source]).astype(np.float64)
            for token in range(tokens.start, tokens.stop):
                q, k = (
                    np.repeat(part.reshape(self.num_key_heads, -1), heads // self.num_key_heads, 0)
                    for part in (x[token, :keys], x[token, keys : 2 * keys])
                )
                v = x[token, 2 * keys :].reshape(heads, -1)
                step = np.log1p(np.exp(steps[token, :heads] + self.weights["step_bias"]))
                step = np.clip(step, *self.limits)
                decay = np.exp(-step * self.weights["rate"])[:, None, None]
                if self.rule == "gated_delta":
                    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
                    q = q / np.sqrt(self.key_dim)
                    beta = self.beta_scale / (1 + np.exp(-betas[token, :heads]))
                    state = decay * state
                    added = beta[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
                else:
                    state, added = decay * state, step[:, None] * v
                state = state + k[:, :, None] * added[:, None]
                y = np.einsum("hkv,hk->hv", state, q)
                found[token] = (y + self.weights.get("skip", np.zeros(heads))[:, None] * v).ravel()
            after[target] = self.packed(state)
        gate = _silu(z[:, : found.shape[1]])
        if self.norm == "":
            return found * gate, after
        if self.norm == "gate_then_norm":
            found = found * gate
        groups = found.reshape(len(found), -1, self.norm_size)
        groups = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + 1e-5)
        found = groups.reshape(found.shape) * self.weights["norm_weight"]
        return found * gate if self.norm == "norm_then_gate" else found, after

    def unpacked(self, state: Array) -> Array:
        """A state [heads, key_dim, value_dim] of its panels [heads, panels, key_dim, 32]."""
        return state.swapaxes(1, 2).reshape(self.num_heads, self.key_dim, -1)[..., : self.value_dim]

    def packed(self, state: Array) -> Array:
        padded = np.pad(state, ((0, 0), (0, 0), (0, -self.value_dim % PANEL)))
        return padded.reshape(self.num_heads, self.key_dim, -1, PANEL).swapaxes(1, 2)


def _random(shape: tuple[int, ...], *, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _call(
    name: str,
    attributes: ctypes.Structure,
    structure: type[ctypes.Structure],
    tensors: dict[str, Array],
    y: Array,
    *,
    threads: int = 2,
    instruction_set: str = "",
) -> Array:
    error = Error()
    inputs = structure(*(Tensor.of(tensors.get(field[0])) for field in structure._fields_))
    done = getattr(library(instruction_set), f"genserve_{name}")(
        ctypes.byref(attributes),
        ctypes.byref(inputs),
        ctypes.byref(Tensor.of(y)),
        ctypes.byref(Threads.of(threads)),
        ctypes.byref(error),
    )
    if not done:
        raise StateError(error.message.decode())
    return y
