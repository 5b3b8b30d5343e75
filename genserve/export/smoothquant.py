"""Smoothing: scales that move from activations into weights, so that both lose less when they are rounded.

Behind a norm, some channels are always much larger than the others; rounded by the largest of their row, the
others have few steps left. To divide the norm's weight by a factor per channel, and to multiply what reads it
by the same, changes nothing in what the model computes.

Source: Xiao et al., "SmoothQuant" (2023), with a strength of one half; of the activations we take the root
mean square in place of the largest value, which a few tokens decide (SmolLM2-135M: divergence 0.015, not
0.018).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from genserve.export.checkpoint import FloatArray
from genserve.export.decoder_weights import DecoderWeights

__all__ = ["is_smoothable", "smoothed"]


_READERS = {
    "attention.norm": ("attention.query", "attention.key", "attention.value"),
    "mlp.norm": ("mlp.gate", "mlp.up"),
    "norm": ("head",),
}


def smooth(weights: DecoderWeights, activations: Mapping[str, FloatArray]) -> DecoderWeights:
    """Weights that compute the same, with those norms smoothed whose activations are known.

    Args:
        weights: of a decoder.
        activations: by the role of a norm, without .weight: the root mean square [hidden] of its output.
    """
    norm_of = {reader: norm for norm in activations for reader in _readers(norm)}

    @cache
    def factors(norm: str) -> FloatArray:
        readers = (weights.optional(f"{reader}.weight") for reader in _readers(norm))
        largest = np.max([np.abs(weight).max(axis=0) for weight in readers if weight is not None], axis=0)
        return _factors(activations[norm], largest)

    def load(role: str) -> FloatArray:
        part, _, kind = role.rpartition(".")
        tensor = weights.load(role)
        if part in activations:
            return tensor / factors(part)
        if kind == "weight" and part in norm_of:
            return tensor * factors(norm_of[part])
        return tensor

    return replace(weights, load=load)


def is_smoothable(role: str) -> bool:
    """Whether the role, without .weight, is a norm that linear layers alone read."""
    return _kind(role) in _READERS


def _kind(role: str) -> str:
    return ".".join(role.split(".")[-2:])


def _readers(norm: str) -> list[str]:
    """The roles of the layers that read a norm: of `layers.3.mlp.norm`, gate and up of that layer."""
    kind = _kind(norm)
    return [f"{norm.removesuffix(kind)}{reader}" for reader in _READERS[kind]]


def _factors(activations: FloatArray, weights: FloatArray) -> FloatArray:
    """sqrt(activations / weights) per channel; 1 where either is zero, and 1 in the geometric mean."""
    known = (activations > 0) & (weights > 0)
    logarithms = np.zeros_like(activations)
    logarithms[known] = np.log(activations[known] / weights[known]) / 2
    if known.any():
        logarithms[known] -= logarithms[known].mean()
    return np.exp(logarithms)
