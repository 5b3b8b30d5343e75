"""Mixer graph: writes the layers with recurrent states: short convolutions and linear attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from genserve.export.decoder import LinearAttention, ShortConv, StateSizes
from genserve.export.graphs.onnx_graph import Dims
from genserve.export.graphs.role_writer import RoleWriter
from genserve.sampling.logits_array import FloatArray

# The inputs of a graph that describe the slots of its sequences' states, in the order of the operators.
_STATE_INPUTS = ("cumulative_sequence_length", "state_source", "state_target")


@dataclass(frozen=True, slots=True)
class MixerWriter:
    """Adds mixers with their states; methods return the names of the values that they add."""

    roles: RoleWriter

    def short_conv(self, x: str, index: int, mixer: ShortConv) -> str:
        """Gates around a convolution: [num_tokens, hidden]."""
        part, hidden = f"layers.{index}.mixer", self.roles.decoder.hidden_size
        gated = self._read(x, part, "input")
        bias = self.roles.weights.optional(f"{part}.conv.bias")
        weight = self.roles.weights.load(f"{part}.conv.weight")
        return self._conv(gated, index, mixer.states(hidden), weight=weight, bias=bias, gated=1)

    def linear_attention(self, x: str, index: int, mixer: LinearAttention) -> str:
        """Heads with a state, after a convolution: [num_tokens, heads * value_dim]."""
        part, heads = f"layers.{index}.mixer", mixer.num_heads
        delta = mixer.rule == "gated_delta"
        names = ["query", "key", "value", "gate", "step", *(["beta"] if delta else [])]
        read = self._read(x, part, *names)
        convs = [f"{part}.{role}_conv" for role in names[:3]]
        biases = [bias for conv in convs if (bias := self.roles.weights.optional(f"{conv}.bias")) is not None]
        states = mixer.states(self.roles.decoder.hidden_size)
        weight = np.concatenate([self.roles.weights.load(f"{conv}.weight") for conv in convs])
        bias = np.concatenate(biases) if biases else None
        mixed = self._conv(read, index, states, weight=weight, bias=bias, activation="silu")
        values, gate = heads * mixer.value_dim, len(weight)
        norm = "" if mixer.norm == "" else f"{part}.out_norm.weight"
        if norm:
            own = self.roles.weights.load(norm)
            self.roles.graph.weight(norm, np.tile(own, values // len(own)))
        past, present = self._state(index, "recurrent", states)
        return self.roles.graph.node(
            "LinearAttention",
            [
                mixed, read, self.roles.fp32(f"{part}.rate"), self.roles.fp32(f"{part}.step_bias"),
                self.roles.fp32(f"{part}.skip"), norm, *_STATE_INPUTS, past,
            ],
            self.roles.graph.value(f"{part}.heads", np.float32),
            present,
            rule=mixer.rule,
            norm=mixer.norm,
            num_key_heads=mixer.num_key_heads,
            num_heads=heads,
            key_dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            norm_size=mixer.norm_size,
            epsilon=mixer.norm_epsilon,
            beta_scale=mixer.beta_scale,
            step_min=mixer.step_limits[0],
            step_max=mixer.step_limits[1],
            gate_offset=gate,
            step_offset=gate + values,
            beta_offset=gate + values + heads if delta else 0,
        )

    def _read(self, x: str, part: str, *roles: str) -> str:
        """The linear layers that read the residual."""
        linear = self.roles.linear(x, part, *roles, output="input", **self.roles.pre_norm(part))
        return self.roles.layers.linear(linear)

    def _conv(
        self,
        x: str,
        index: int,
        states: StateSizes,
        *,
        weight: FloatArray,
        bias: FloatArray | None,
        **attributes: Any,
    ) -> str:
        """The convolution of the first columns of x, with a weight [channels, kernel_size]."""
        name = f"layers.{index}.mixer.conv"
        past, present = self._state(index, "conv", states)
        tensors = [
            self.roles.graph.weight(f"{name}.weight", np.ascontiguousarray(weight.T)),
            "" if bias is None else self.roles.graph.weight(f"{name}.bias", bias),
        ]
        return self.roles.graph.node(
            "CausalConv",
            [x, *tensors, *_STATE_INPUTS, past],
            self.roles.graph.value(f"{name}.channels", np.float32),
            present,
            channels=weight.shape[0],
            kernel_size=weight.shape[1],
            **attributes,
        )

    def _state(self, index: int, name: str, states: StateSizes) -> tuple[str, str]:
        """Declare a buffer of a layer's states: the names of its input and output."""
        dims: Dims = ("num_slots", *states[name])
        present = f"present_states.{index}.{name}"
        self.roles.graph.output(present, np.float32, dims)
        return self.roles.graph.input(f"past_states.{index}.{name}", np.float32, dims), present
