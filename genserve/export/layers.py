"""Layers: what holds weights - linear layers, embedding, head, norms - in the numbers of an export."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from genserve.export.checkpoint import FloatArray
from genserve.export.graph import Graph
from genserve.export.precision import Format
from genserve.export.quantize import Scheme, quantize, quantize_rows

__all__ = ["Layers", "Vocabulary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A weight [vocab, hidden] that is stored once and serves as embedding, as head, or as both."""

    values: str
    scales: str | None  # None: not quantised
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layers:
    """Adds layers to a graph; the operators and the weights' types follow from the format."""

    graph: Graph
    numbers: Format

    def vector(self, name: str, value: FloatArray) -> str:
        """Add a norm, a bias or a table in the type of the activations."""
        return self.graph.weight(name, value.astype(self.numbers.activations))

    def linear(
        self,
        x: str,
        weight: FloatArray,
        output: str,
        *,
        bias: FloatArray | None = None,
        in_blocks: bool = False,
    ) -> str:
        """Add `x @ weight.T + bias`.

        Args:
            x: a value [..., K].
            weight: [N, K].
            output: the name of the result [..., N]; the weights are named after it.
            bias: [N].
            in_blocks: what is rounded is rounded in blocks of a row, also where most of the model is by row.
        """
        product = output if bias is None else f"{output}.product"
        if self.numbers.linear is None:
            matrix = self.vector(f"{output}.weight", weight.T)
            self.graph.node("MatMul", [x, matrix], product)
        elif self.numbers.by_row and not in_blocks:
            self._row_matmul(x, weight, product)
        else:
            values, scales = self._quantised(f"{output}.weight", weight, self.numbers.linear)
            self._block_matmul(x, values, scales, product, shape=weight.shape, scheme=self.numbers.linear)
        if bias is None:
            return output
        return self.graph.node("Add", [product, self.vector(f"{output}.bias", bias)], output)

    def vocabulary(self, name: str, weight: FloatArray) -> Vocabulary:
        """Store a weight [vocab, hidden] for `embedding` and `head`."""
        shape = (weight.shape[0], weight.shape[1])
        if self.numbers.vocabulary is None:
            return Vocabulary(values=self.vector(name, weight), scales=None, shape=shape)
        values, scales = self._quantised(name, weight, self.numbers.vocabulary)
        return Vocabulary(values=values, scales=scales, shape=shape)

    def embedding(self, ids: str, vocabulary: Vocabulary, output: str) -> str:
        """Add the look-up of token ids [...] in a vocabulary: [..., hidden]."""
        scheme = self.numbers.vocabulary
        if vocabulary.scales is None or scheme is None:
            return self.graph.node("Gather", [vocabulary.values, ids], output)
        num_tokens, hidden = vocabulary.shape
        row_bytes = -(-hidden // scheme.block_size) * scheme.block_size * scheme.bits // 8
        rows = self.graph.view(f"{vocabulary.values}.rows", vocabulary.values, (num_tokens, row_bytes))
        padded = hidden % scheme.block_size != 0
        whole = self.graph.node(
            "GatherBlockQuantized",
            [rows, ids, vocabulary.scales],
            f"{output}.padded" if padded else output,
            bits=scheme.bits,
            block_size=scheme.block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        return self._first_columns(whole, output, width=hidden) if padded else whole

    def head(self, x: str, vocabulary: Vocabulary, output: str) -> str:
        """Add the scores of all tokens for hidden rows [rows, hidden]: [rows, vocab], float32."""
        scheme, values = self.numbers.vocabulary, vocabulary.values
        if vocabulary.scales is not None and scheme is not None:
            return self._block_matmul(
                x, values, vocabulary.scales, output, shape=vocabulary.shape, scheme=scheme
            )
        if self.numbers.activations is np.float32:
            return self.graph.node("Gemm", [x, values], output, transB=1)
        scores = self.graph.node("Gemm", [x, values], f"{output}.fp16", transB=1)
        return self.graph.node("Cast", [scores], output, to=1)

    def _quantised(self, name: str, weight: FloatArray, scheme: Scheme) -> tuple[str, str]:
        blocks = quantize(weight, scheme)
        return self.graph.weight(name, blocks.values), self.graph.weight(f"{name}.scales", blocks.scales)

    def _row_matmul(self, x: str, weight: FloatArray, output: str) -> str:
        """Add the product of 8-bit integers; a row of the result depends on its row of x alone, to the bit.

        x / max|x| of its row, in steps of 1/127, times the integers of the weight, times the scales.
        A row of zeros is 0/0 on its way, and some integer times zero in the end.
        ONNX Runtime's ReduceMax passes over a NaN that is not the first of its row. None comes so: rows come
        from a norm, or from attention over what one has made, and a NaN before it is one in all of the row.
        """
        rows, name = quantize_rows(weight), f"{output}.weight"
        values = self.graph.weight(name, rows.values.T)
        scales = self.graph.weight(f"{name}.scales", rows.scales)
        step = self.graph.constant(f"{x}.step", np.array(1 / 127, np.float32))
        middle = self.graph.constant(f"{x}.middle", np.array(128, np.uint8))
        magnitudes = self.graph.node("Abs", [x], f"{x}.magnitudes")
        last = self.graph.constant(f"{x}.last", np.array([-1]))
        largest = self.graph.node("ReduceMax", [magnitudes, last], f"{x}.largest", keepdims=1)
        shares = self.graph.node("Div", [x, largest], f"{x}.shares")
        integers = self.graph.node("QuantizeLinear", [shares, step, middle], f"{x}.integers")
        inputs = [integers, values, step, scales, middle]
        product = self.graph.node("MatMulIntegerToFloat", inputs, f"{output}.shares")
        return self.graph.node("Mul", [product, largest], output)

    def _block_matmul(
        self, x: str, values: str, scales: str, output: str, *, shape: tuple[int, ...], scheme: Scheme
    ) -> str:
        return self.graph.node(
            "MatMulNBits",
            [x, values, scales],
            output,
            N=shape[0],
            K=shape[1],
            bits=scheme.bits,
            block_size=scheme.block_size,
            accuracy_level=4,  # the activations in int8 too, a scale per row and block: about twice as fast
        )

    def _first_columns(self, x: str, output: str, *, width: int) -> str:
        bounds = {"starts": 0, "ends": width, "axes": -1}
        constants = [
            self.graph.constant(f"{output}.{name}", np.array([value])) for name, value in bounds.items()
        ]
        return self.graph.node("Slice", [x, *constants], output)
