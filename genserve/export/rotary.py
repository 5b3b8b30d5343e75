"""Rotary: the angles by which the heads of a model turn, as its config says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from genserve.export.decoder import Rotary
from genserve.export.family import require

__all__ = ["read_rotary", "rotary_limit"]

# Those of transformers whose angles depend on the position alone, up to `rotary_limit` at least.
_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


def read_rotary(config: Any, *, num_dims: int, layer_type: str | None = None) -> Rotary:
    """The rotary positions of a config of transformers.

    Args:
        config: with `rope_parameters`.
        num_dims: how many numbers of a head turn.
        layer_type: whose parameters to take, where types of layers have their own.

    Raises:
        ExportError: the type of the angles is another one.
    """
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = parameters["rope_type"]
    require(kind in _TYPES, found=f"rope_scaling of type {kind!r}", known=", ".join(_TYPES))
    if kind == "default":
        return Rotary(frequencies=_frequencies(parameters, num_dims=num_dims))
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
    return Rotary(frequencies=tuple(frequencies.tolist()), scale=scale)


def rotary_limit(config: Any) -> int:
    """How many tokens the angles are those of; in a longer text, longrope turns by others from its start."""
    parameters, limit = config.rope_parameters, config.max_position_embeddings
    if parameters.get("rope_type") == "longrope":
        limit = parameters["original_max_position_embeddings"]
    tokens: int = limit
    return tokens


def _frequencies(parameters: Mapping[str, Any], *, num_dims: int) -> tuple[float, ...]:
    """Source: Su et al., "RoFormer" (2021); in float32 as transformers has it."""
    exponents = torch.arange(0, num_dims, 2, dtype=torch.float) / num_dims
    return tuple((1.0 / parameters["rope_theta"] ** exponents).tolist())
