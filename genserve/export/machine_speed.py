"""Machine speed: measures in about a second how quickly this machine multiplies by int8 weights.

A step reads all weights once, for however many sequences. With one row its time is that of reading them from
memory; with many rows, that of the products. The weights are larger than most caches of processors.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from genserve.export.graphs.onnx_graph import OnnxGraphBuilder
from genserve.export.known_models import ModelShape
from genserve.kernels.packing import PANEL

MANY_ROWS = 32

# Layers that widen and narrow rows, like an MLP: 8 MB of weights each.
_NARROW, _WIDE, _PAIRS = 2048, 4096, 8
_RUNS = 5
# Such products take this share of a step in a server, by the number of sequences (docs/performance.md).
# Attention over some hundred tokens, norms, sampling and text take the rest.
_SHARES = {1: 0.8, MANY_ROWS: 0.55}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeed:
    """The speed of products of `Linear`, by the number of rows."""

    bytes_per_s: float          # weights that a product with one row reads: the bandwidth of the memory
    operations_per_s: float     # multiplications and additions of a product with many rows

    def tokens_per_s(self, shape: ModelShape, *, sequences: int = 1) -> float:
        """Estimate the tokens per second of a model: one sequence, or `MANY_ROWS` of them together.

        The estimate is for short contexts and without speculation.
        """
        read_s = shape.step_bytes / self.bytes_per_s
        computed_s = 2 * sequences * shape.step_bytes / self.operations_per_s
        return sequences * _SHARES[sequences] / max(read_s, computed_s)


def measure_speed() -> MachineSpeed:
    """Measure the products on all threads that a server would use.

    Raises:
        GenserveError: there are no kernels for this machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        session = _session(Path(folder))
    num_bytes = 2 * _PAIRS * _NARROW * _WIDE
    many_s = _best_s(session, rows=MANY_ROWS)
    return MachineSpeed(
        bytes_per_s=num_bytes / _best_s(session, rows=1),
        operations_per_s=2 * MANY_ROWS * num_bytes / many_s,
    )


def _session(folder: Path) -> Any:
    from genserve.backends.onnx_session import (
        CPU_PROVIDER,
        create_session,
        register_kernels,
        session_options,
    )

    random = np.random.default_rng(0)
    with OnnxGraphBuilder(folder) as graph:
        x = graph.input("x", np.float32, ("rows", _NARROW))
        for index in range(2 * _PAIRS):
            inputs, outputs = (_NARROW, _WIDE) if index % 2 == 0 else (_WIDE, _NARROW)
            panels = outputs // PANEL
            packed = random.integers(0, 256, (panels, inputs // 4, PANEL, 4), np.uint8)
            # Outputs are as large as inputs.
            scales = np.full((panels, PANEL), 1 / (74 * inputs**0.5), np.float32)
            weights = [graph.weight(f"weight.{index}", packed), graph.weight(f"scales.{index}", scales)]
            output = graph.value(f"y.{index}", np.float32)
            x = graph.node(
                "Linear",
                [x, *weights, "", "", "", ""],
                output,
                out_features=outputs,
                in_features=inputs,
                weight_format="int8",
                activation="",
                gated=0,
                softcap=0.0,
            )
        graph.output(x, np.float32, ("rows", _NARROW))
        graph.save(metadata={})
    options = session_options()
    register_kernels(options)
    return create_session(folder, options, [CPU_PROVIDER])


def _best_s(session: Any, *, rows: int) -> float:
    """Return the least seconds of a run of the layers."""
    inputs = {"x": np.ones((rows, _NARROW), np.float32)}
    seconds = []
    for _ in range(_RUNS):
        started_s = time.perf_counter()
        session.run(None, inputs)
        seconds.append(time.perf_counter() - started_s)
    return min(seconds)
