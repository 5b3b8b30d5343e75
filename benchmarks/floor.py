"""Floor: the lower bound of the time of a decode step on this machine, its actual time, and its profile.

    python benchmarks/floor.py --model-repository model_repository --model smollm2

measures memory bandwidth and the speed of matrix products, counts the bytes and operations of the exported
graph's steps (`operations.py`), times them (`graph_steps.py`), and profiles them by kind of operator with
ONNX Runtime. Prints tables in Markdown. The floor assumes that weights and cache are read from memory. A step
can be faster if the processor's caches hold a part of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import torch
from graph_steps import GraphSteps, model_path, open_session
from operations import Machine, Part, read_parts
from report import markdown

from genserve.backends.onnx_session import session_options
from genserve.machine import num_cores

# Elements of an array that is larger than any cache of the processor.
READ_BYTES = 1 << 30
MATRIX = 1024      # a product in int8 takes a second where torch has no instructions for it
FLOOR_HEADINGS = ("rows x context", "read, MB", "GOP", "floor, ms", "step, ms", "share", "tokens/s")
MIN_SHARE = 0.01    # operators with a smaller share of every step are summed up


class Size(NamedTuple):
    """The size of a decode step."""

    rows: int
    context: int    # cached tokens per row

    def __str__(self) -> str:
        return f"{self.rows} x {self.context}"


def main() -> None:
    options = _options()
    path = model_path(options.model_repository, options.model)
    sizes = [Size(rows, context) for rows in options.rows for context in options.contexts]
    parts = read_parts(path)
    before, steps_s, after = _machine(), _steps_s(path, sizes, options=options), _machine()
    machine = _best([before, after])  # the machine may have slow minutes
    print(_summary(machine, parts))
    rows = [_floor_row(size, parts, machine, step_s=min(steps_s[size])) for size in sizes]
    print(f"\n{markdown(FLOOR_HEADINGS, rows)}\n")
    profiles = {size: _profile(path, size, steps=options.steps) for size in sizes}
    print(_operator_table(profiles, steps_s))
    if options.json:
        _write(options.json, machine=machine, parts=parts, steps_s=steps_s, profiles=profiles)


def _machine() -> Machine:
    array = torch.ones(READ_BYTES // 4)
    floats = torch.randn(MATRIX, MATRIX)
    integers = torch.randint(-127, 127, (MATRIX, MATRIX), dtype=torch.int8)
    operations = 2 * MATRIX**3
    return Machine(
        bytes_per_s=READ_BYTES / _best_s(array.sum),
        operations_per_s={
            "float32": operations / _best_s(lambda: floats @ floats),
            "int8": operations / min(map(_best_s, _integer_products(integers))),
        },
    )


def _integer_products(integers: torch.Tensor) -> list[Callable[[], object]]:
    """Return functions that multiply a matrix by itself: torch's, slow without VNNI, and ONNX Runtime's."""
    weight = onnx.numpy_helper.from_array(integers.numpy(), "weight")
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, integers.shape)
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT32, integers.shape)
    node = onnx.helper.make_node("MatMulInteger", ["x", "weight"], ["y"])
    graph = onnx.helper.make_graph([node], "product", [x], [y], [weight])
    opset = onnx.helper.make_opsetid("", 20)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options())
    inputs = {"x": integers.numpy().view(np.uint8)}
    return [lambda: torch._int_mm(integers, integers), lambda: session.run(None, inputs)]


def _best_s(call: Callable[[], object], *, times: int = 10, most_s: float = 2.0) -> float:
    """Return the least seconds of a call that is repeated `times` times, or until `most_s` have passed."""
    call()
    seconds: list[float] = []
    while len(seconds) < times and sum(seconds) < most_s:
        started_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds)


def _best(machines: list[Machine]) -> Machine:
    kinds = machines[0].operations_per_s
    return Machine(
        bytes_per_s=max(machine.bytes_per_s for machine in machines),
        operations_per_s={kind: max(m.operations_per_s[kind] for m in machines) for kind in kinds},
    )


def _steps_s(path: Path, sizes: list[Size], *, options: argparse.Namespace) -> dict[Size, list[float]]:
    """Return the median seconds of a step in each round; the sizes alternate."""
    session = open_session(path)
    steps_s: dict[Size, list[float]] = {size: [] for size in sizes}
    for _ in range(options.rounds):
        for rows in options.rows:
            graph = GraphSteps(
                session, path=path, rows=rows, max_length=max(options.contexts) + options.steps
            )
            for context in options.contexts:
                graph.decode(past=context, steps=2)  # the first step allocates buffers
                seconds = graph.decode(past=context, steps=options.steps)
                steps_s[Size(rows, context)].append(statistics.median(seconds))
    return steps_s


def _profile(path: Path, size: Size, *, steps: int) -> Mapping[str, float]:
    """Return the seconds of one step by kind of operator, including some overhead of the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(path, profile=Path(folder) / "profile")
        graph = GraphSteps(session, path=path, rows=size.rows, max_length=size.context + steps)
        graph.decode(past=size.context, steps=steps)
        events = json.loads(Path(session.end_profiling()).read_bytes())
    [vocab_size] = (o.shape[-1] for o in session.get_outputs() if o.name == "logits")
    seconds: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            seconds[_kind(event["args"], vocab_size=vocab_size)] += event["dur"] / steps / 1e6
    return seconds


def _kind(node: Mapping[str, Any], *, vocab_size: int) -> str:
    shapes = [shape for output in node["output_type_shape"] for shape in output.values()]
    is_head = any(shape[-1:] == [vocab_size] for shape in shapes)
    return f"{node['op_name']} (head)" if is_head else str(node["op_name"])


def _summary(machine: Machine, parts: list[Part]) -> str:
    rates = ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in machine.operations_per_s.items())
    weights = sum(part.weight_bytes for part in parts) / 1e6
    cache = sum(part.cache_bytes_per_token for part in parts) / 1e3
    return (
        f"Machine: {num_cores()} cores, {machine.bytes_per_s / 1e9:.0f} GB/s read; matrix products in "
        f"GOP/s: {rates}. Model: {weights:.0f} MB of weights, {cache:.1f} kB of cache per token."
    )


def _floor_row(size: Size, parts: list[Part], machine: Machine, *, step_s: float) -> tuple[str, ...]:
    tokens = size.rows * size.context
    num_bytes = sum(part.weight_bytes + part.cache_bytes_per_token * tokens for part in parts)
    operations = sum(p.operations_per_row * size.rows + p.operations_per_token * tokens for p in parts)
    floor_s = sum(part.floor_s(machine, rows=size.rows, context=size.context) for part in parts)
    return (
        str(size),
        f"{num_bytes / 1e6:.0f}",
        f"{operations / 1e9:.2f}",
        f"{floor_s * 1e3:.1f}",
        f"{step_s * 1e3:.1f}",
        f"{floor_s / step_s:.0%}",
        f"{size.rows / step_s:.0f}",
    )


def _operator_table(profiles: Mapping[Size, Mapping[str, float]], steps_s: Mapping[Size, list[float]]) -> str:
    """Return a table of milliseconds and shares, less the profiler's overhead in proportion."""
    shares = {
        size: {kind: part_s / sum(seconds.values()) for kind, part_s in seconds.items()}
        for size, seconds in profiles.items()
    }
    kinds = sorted(
        {kind for share in shares.values() for kind, part in share.items() if part >= MIN_SHARE},
        key=lambda kind: -max(share.get(kind, 0.0) for share in shares.values()),
    )
    rows = []
    for kind in kinds:
        cells = [_cell(share.get(kind, 0.0), min(steps_s[size])) for size, share in shares.items()]
        rows.append((kind, *cells))
    rest = [_cell(1 - sum(share.get(k, 0.0) for k in kinds), min(steps_s[s])) for s, share in shares.items()]
    rows.append(("the rest", *rest))
    return markdown(("ms of a step", *map(str, shares)), rows)


def _cell(share: float, step_s: float) -> str:
    return f"{share * step_s * 1e3:.1f} ({share:.0%})"


def _write(
    path: Path,
    *,
    machine: Machine,
    parts: list[Part],
    steps_s: Mapping[Size, list[float]],
    profiles: Mapping[Size, Mapping[str, float]],
) -> None:
    report = {
        "machine": asdict(machine),
        "parts": [asdict(part) for part in parts],
        "steps_s": {str(size): seconds for size, seconds in steps_s.items()},
        "profiles_s": {str(size): seconds for size, seconds in profiles.items()},
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256, 768])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="per size and round")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
