"""Fused layers: a norm, a product, and what follows it, as one operator of ours (`genserve.kernels`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from genserve.export.checkpoint import FloatArray
from genserve.export.decoder import Activation
from genserve.export.graph import Graph
from genserve.export.layers import Norm, Place
from genserve.export.precision import Format
from genserve.kernels.packing import (
    BLOCKS,
    Quantized,
    WeightFormat,
    pack_float32,
    pack_quantized,
    quantize,
)

__all__ = ["FusedLayers"]

_ROWS = 1024


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """Implements `Layers` by `genserve.Linear`: activations in float32, weights packed for it."""

    graph: Graph
    numbers: Format

    def vector(self, name: str, value: FloatArray) -> str:
        """See `Layers.vector`."""
        return self.graph.weight(name, value.astype(np.float32))

    def embedding(self, ids: str, weight: FloatArray, output: str) -> str:
        """See `Layers.embedding`."""
        weight_format, hidden = self.numbers.embedding, weight.shape[1]
        if weight_format is None:
            return self.graph.node("Gather", [self.vector("embedding", weight), ids], output)
        block_size = BLOCKS[weight_format]
        assert block_size is not None
        values, scales = _quantized(weight, weight_format)
        padding = -hidden % block_size
        offset = np.pad(values, ((0, 0), (0, padding))).view(np.uint8) + np.uint8(128)
        rows = self.graph.node(
            "GatherBlockQuantized",
            [self.graph.weight("embedding", offset), ids, self.graph.weight("embedding.scales", scales)],
            f"{output}.padded" if padding else output,
            bits=8,
            block_size=block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        return self._first_columns(rows, output, width=hidden) if padding else rows

    def linear(
        self,
        x: str,
        weight: FloatArray,
        output: str,
        *,
        place: Place,
        bias: FloatArray | None = None,
        norm: Norm | None = None,
        activation: Activation | None = None,
        gated: bool = False,
        residual: str = "",
        softcap: float | None = None,
    ) -> str:
        """See `Layers.linear`; `softcap` bends the outputs."""
        weight_format: WeightFormat | None = getattr(self.numbers, place)
        norm_weights = self._norm_weights(norm) if norm else ["", ""]
        inputs = [
            x,
            *self._packed(f"{output}.weight", weight, weight_format, gated=gated),
            "" if bias is None else self.vector(f"{output}.bias", bias),
            *norm_weights,
            residual,
        ]
        self.graph.node(
            "Linear",
            inputs,
            self.graph.value(output, np.float32),
            out_features=weight.shape[0],
            in_features=weight.shape[1],
            weight_format=weight_format or "float32",
            activation=activation or "",
            gated=int(gated),
            softcap=softcap or 0.0,
            **({"norm": norm.kind, "epsilon": norm.epsilon} if norm else {}),
        )
        return output

    def head(
        self, x: str, weight: FloatArray, output: str, *, norm: Norm, softcap: float | None, tied: bool
    ) -> str:
        """See `Layers.head`; a tied weight is stored a second time, packed for the product."""
        del tied
        return self.linear(x, weight, output, place="head", norm=norm, softcap=softcap)

    def _norm_weights(self, norm: Norm) -> list[str]:
        weight = self.vector(f"{norm.name}.weight", norm.weight)
        return [weight, "" if norm.bias is None else self.vector(f"{norm.name}.bias", norm.bias)]

    def _packed(
        self, name: str, weight: FloatArray, weight_format: WeightFormat | None, *, gated: bool
    ) -> list[str]:
        """Add a weight [N, K] and its scales, if it has some, as the operator reads them."""
        if weight_format is None:
            return [self.graph.weight(name, pack_float32(weight, gated=gated)), ""]
        packed = pack_quantized(_quantized(weight, weight_format), weight_format, gated=gated)
        return [
            self.graph.weight(name, packed.weight), self.graph.weight(f"{name}.scales", packed.scales)
        ]

    def _first_columns(self, x: str, output: str, *, width: int) -> str:
        bounds = {"starts": 0, "ends": width, "axes": -1}
        constants = [
            self.graph.constant(f"{output}.{name}", np.array([value])) for name, value in bounds.items()
        ]
        return self.graph.node("Slice", [x, *constants], output)


def _quantized(weight: FloatArray, weight_format: WeightFormat) -> Quantized:
    """Round a weight some rows at a time: what lies between it and the result takes some times its memory."""
    parts = [quantize(weight[i : i + _ROWS], weight_format) for i in range(0, len(weight), _ROWS)]
    values, scales = map(np.concatenate, zip(*parts, strict=True))
    return Quantized(values, scales)
