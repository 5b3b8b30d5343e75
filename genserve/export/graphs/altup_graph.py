"""AltUp graph: writes the streams of hidden states of Gemma 3n, and what a layer makes of them.

A layer reads the first stream as a linear map of all streams predicts it, and what it returns corrects the
predictions of all of them. Source: Baykal et al., "Alternating Updates for Efficient Transformers" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from genserve.export.decoder import AltUp
from genserve.export.graphs.role_writer import RoleWriter


@dataclass(frozen=True, slots=True)
class AltUpWriter:
    """Adds the parts of AltUp to a graph; methods return the names of the values that they add.

    Streams are values [rows, streams, hidden].
    """

    roles: RoleWriter

    @property
    def described(self) -> AltUp:
        """Its sizes."""
        assert self.roles.decoder.altup is not None
        return self.roles.decoder.altup

    def streams(self, x: str) -> str:
        """Return the streams of embeddings x: x, and linear ones as large as x."""
        linear = self.roles.linear(x, "altup", "input", output="input", kind="inner")
        others = self.roles.layers.linear(linear)
        return self._as_large(x, self._by_stream(others, "altup.others"), "altup.streams")

    def joined(self, streams: str) -> str:
        """Return the mean [rows, hidden] of the first stream and linear ones of the others, as large."""
        count, node = self.described.num_streams, self.roles.graph.node
        first, others = self._parted(streams, "altup.last")
        flat = self._constant("altup.last.flat", 0, -1)
        first = node("Reshape", [first, flat], "altup.last.own")
        columns = node("Reshape", [others, flat], "altup.last.columns")
        others = self.roles.in_groups(columns, "altup.output", count - 1)
        others = self._by_stream(others, "altup.last.linear")
        streams = self._as_large(first, others, "altup.last")
        parts = [f"altup.last.{index}" for index in range(count)]
        node("Split", [streams], *parts, axis=1, num_outputs=count)
        total = node("Sum", parts, "altup.last.sum")
        mean = node("Mul", [total, self.roles.number("altup.last.share", 1 / count)], "altup.last.mean")
        return node("Reshape", [mean, flat], "altup.last.rows")

    def predicted(self, streams: str, index: int) -> tuple[str, str]:
        """Return the predicted streams, and the first of them [rows, hidden], which the layer reads."""
        node, part, count = self.roles.graph.node, f"layers.{index}.altup", self.described.num_streams
        first = self.roles.graph.constant(f"{part}.first", np.array(0))
        own = node("Gather", [streams, first], f"{part}.own", axis=1)
        routed = self._routed(own, part, "before")
        predict = self.roles.linear(routed, part, "predict", output="predict", kind="exact")
        square = self._constant(f"{part}.square", 0, count, count)
        factors = node("Reshape", [self.roles.layers.linear(predict), square], f"{part}.factors")
        name = self.roles.graph.value(f"{part}.predicted", np.float32)
        predicted = node("StreamMix", [streams, factors], name)
        return predicted, node("Gather", [predicted, first], f"{part}.active", axis=1)

    def corrected(self, predicted: str, active: str, activated: str, index: int) -> tuple[str, str]:
        """Return the corrected streams, and the scaled first of them [rows, hidden].

        The layer has read `active`, the first of the streams `predicted`, and returns `activated`.
        """
        node, part = self.roles.graph.node, f"layers.{index}.altup"
        routed = self._routed(activated, part, "after")
        correct = self.roles.linear(routed, part, "correct", output="correct", kind="exact")
        one = self.roles.number(f"{part}.one", 1.0)
        shares = node("Add", [self.roles.layers.linear(correct), one], f"{part}.shares")
        columns = node("Unsqueeze", [shares, self._constant(f"{part}.axis.2", 2)], f"{part}.columns")
        news = node("Sub", [activated, active], f"{part}.news")
        axis = self._constant(f"{part}.axis.1", 1)
        rows = node("Unsqueeze", [news, axis], f"{part}.rows")
        corrections = node("Mul", [columns, rows], f"{part}.corrections")
        corrected = node("Add", [corrections, predicted], f"{part}.corrected")
        first, _ = self._parted(corrected, part)
        first = node("Squeeze", [first, axis], f"{part}.first_rows")
        scale = self.roles.layers.vector(f"{part}.scale", self.roles.weights.load(f"{part}.scale"))
        return corrected, node("Mul", [first, scale], f"{part}.scaled")

    def with_others(self, corrected: str, added: str, index: int) -> str:
        """Return the streams `corrected`, to all of which but the first the rows `added` are added."""
        node, part = self.roles.graph.node, f"layers.{index}.altup"
        # `corrected` has taken these apart.
        first, others = f"{part}.first_stream", f"{part}.other_streams"
        rows = node("Unsqueeze", [added, self._constant(f"{part}.axis.added", 1)], f"{part}.added")
        others = node("Add", [others, rows], f"{part}.others_after")
        return node("Concat", [first, others], f"{part}.streams", axis=1)

    def _parted(self, streams: str, part: str) -> tuple[str, str]:
        """The first stream [rows, 1, hidden], and the others."""
        names = f"{part}.first_stream", f"{part}.other_streams"
        sizes = self._constant(f"{part}.sizes", 1, self.described.num_streams - 1)
        self.roles.graph.node("Split", [streams, sizes], *names, axis=1)
        return names

    def _by_stream(self, columns: str, name: str) -> str:
        """Streams of columns [rows, streams * hidden]."""
        shape = self._constant(f"{name}.shape", 0, -1, self.roles.decoder.hidden_size)
        return self.roles.graph.node("Reshape", [columns, shape], name)

    def _as_large(self, x: str, others: str, name: str) -> str:
        """Rows x [rows, hidden] and other streams, with the same mean squares, as streams."""
        node = self.roles.graph.node
        flat = self._constant(f"{name}.hidden", -1, self.roles.decoder.hidden_size)
        rows = node("Reshape", [others, flat], f"{name}.rows_of")
        own_squares = self._mean_squares(x, f"{name}.own_squares")
        other_squares = self._mean_squares(rows, f"{name}.other_squares")
        least = self.roles.number(f"{name}.least", self.described.least)
        other_squares = node("Max", [other_squares, least], f"{name}.at_least")
        shape = self._constant(f"{name}.by_stream", -1, self.described.num_streams - 1, 1)
        other_squares = node("Reshape", [other_squares, shape], f"{name}.by_row")
        axis = self._constant(f"{name}.axis", 1)
        own_squares = node("Unsqueeze", [own_squares, axis], f"{name}.own_by_row")
        roots = [node("Sqrt", [each], f"{each}.root") for each in (own_squares, other_squares)]
        scaled = node("Mul", [others, roots[0]], f"{name}.scaled")
        scaled = node("Div", [scaled, roots[1]], f"{name}.as_large")
        first = node("Unsqueeze", [x, axis], f"{name}.first")
        return node("Concat", [first, scaled], f"{name}.together", axis=1)

    def _mean_squares(self, x: str, name: str) -> str:
        squares = self.roles.graph.node("Mul", [x, x], f"{name}.of")
        return self.roles.layers.means(squares, name, self.roles.decoder.hidden_size)

    def _routed(self, x: str, part: str, when: str) -> str:
        """The numbers [rows, streams] from which coefficients are made, before or after the layer."""
        # A tanh is a soft cap of 1. The layer has two of these, whose weights are small.
        norm = replace(self.roles.norm(f"{part}.norm"), name=f"{part}.{when}.norm")
        linear = self.roles.linear(x, part, "router", output=when, kind="exact", norm=norm, softcap=1.0)
        return self.roles.layers.linear(linear)

    def _constant(self, name: str, *values: int) -> str:
        return self.roles.graph.constant(name, np.array(values))
