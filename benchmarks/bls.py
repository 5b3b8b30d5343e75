"""BLS: what one call costs, and how fast the naive loop is, here and on a real Triton.

    python benchmarks/bls.py --model-repository model_repository --triton tritonserver

serves the same model.py files (`benchmarks/models`) by `genserve serve` and by a real Triton, and asks both
in turn, in each round:

*   `caller` calls `trivial` a few thousand times by BLS and reports the median time of a call;
*   `naive_loop` sends all its ids again for each token, greedy, at 1 request and at several at once.

The real Triton computes the logits with the same exported graph, by ONNX Runtime in a model.py. Without
`--triton` the table has genserve alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
from rich.console import Console
from rich.table import Table
from servers import Ports, genserve_server, triton_server

MODELS = Path(__file__).parent / "models"


def main() -> None:
    options = _options()
    figures: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        clients = {"genserve": stack.enter_context(_genserve(options))}
        if options.triton:
            clients["triton"] = stack.enter_context(_triton(options))
        for client in clients.values():
            _loops(client, concurrency=1, options=options, seed=0)  # warm-up
        for number in range(1, options.rounds + 1):
            for name, client in clients.items():
                figures.setdefault(name, []).append(_round(client, options=options, seed=number))
                print(f"round {number}, {name}: {_told(figures[name][-1])}")
    _print_table({name: _medians(rounds) for name, rounds in figures.items()}, options=options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _round(client: Any, *, options: argparse.Namespace, seed: int) -> dict[str, float]:
    figures = {"call, us": _call_us(client, count=options.calls)}
    for concurrency in options.concurrency:
        figures[f"loop x{concurrency}, tokens/s"] = _loops(
            client, concurrency=concurrency, options=options, seed=seed
        )
    return figures


def _call_us(client: Any, *, count: int) -> float:
    """The median time of one BLS call of a trivial model, microseconds."""
    answer = client.infer("caller", [_tensor("COUNT", np.array([count], np.int32))])
    return float(np.median(answer.as_numpy("SECONDS"))) * 1e6


def _loops(client: Any, *, concurrency: int, options: argparse.Namespace, seed: int) -> float:
    """Tokens per second of so many naive loops at once."""
    prompts = np.random.default_rng(seed).integers(100, 40_000, size=(concurrency, options.prompt_tokens))

    def generate(prompt: np.ndarray) -> int:
        inputs = [
            _tensor("input_ids", prompt[np.newaxis].astype(np.int64)),
            _tensor("max_tokens", np.array([options.max_tokens], np.int32)),
        ]
        return len(client.infer("naive_loop", inputs).as_numpy("output_ids"))

    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        num_tokens = sum(pool.map(generate, prompts))
    return num_tokens / (time.perf_counter() - started)


@contextmanager
def _genserve(options: argparse.Namespace) -> Iterator[Any]:
    with _repository("caller", "trivial", "naive_loop") as folder:
        for path in options.model_repository.glob(f"{options.model}*"):
            (folder / path.name).symlink_to(path.resolve())
        _set_parameter(folder / "naive_loop", "logits_model", f"{options.model}_logits", was="onnx_logits")
        with genserve_server(folder) as ports:
            yield _client(ports)


@contextmanager
def _triton(options: argparse.Namespace) -> Iterator[Any]:
    with _repository("caller", "trivial", "naive_loop", "onnx_logits") as folder:
        stage = options.model_repository / f"{options.model}_logits"
        model = max(stage.glob("[1-9]*"), key=lambda version: int(version.name)) / "model.onnx"
        with (folder / "onnx_logits" / "config.pbtxt").open("a") as config:
            for key, value in {
                "model_path": model.resolve(),
                "site_packages": sysconfig.get_path("purelib"),
            }.items():
                config.write(f'parameters [ {{ key: "{key}" value: {{ string_value: "{value}" }} }} ]\n')
        with triton_server(options.triton, folder) as ports:
            yield _client(ports)


@contextmanager
def _repository(*models: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            shutil.copytree(MODELS / name, Path(folder) / name)
        yield Path(folder)


def _set_parameter(model: Path, key: str, value: str, *, was: str) -> None:
    config = model / "config.pbtxt"
    config.write_text(config.read_text().replace(f'"{was}"', f'"{value}"'))


def _client(ports: Ports) -> Any:
    return triton_grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}")


def _tensor(name: str, array: np.ndarray) -> Any:
    kind = {"int32": "INT32", "int64": "INT64"}[array.dtype.name]
    tensor = triton_grpc.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def _told(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in figures.items())


def _print_table(medians: dict[str, dict[str, float]], *, options: argparse.Namespace) -> None:
    title = f"{options.prompt_tokens}-token prompts, {options.max_tokens} new tokens, {options.rounds} rounds"
    table = Table("", *medians, *(["ratio"] if len(medians) == 2 else []), title=title)
    for name in medians["genserve"]:
        values = [figures[name] for figures in medians.values()]
        ratio = [] if len(values) == 1 else [f"{_ratio(name, *values):.1f}x"]
        table.add_row(name, *(f"{value:.1f}" for value in values), *ratio)
    Console().print(table)


def _ratio(name: str, ours: float, theirs: float) -> float:
    return theirs / ours if name.startswith("call") else ours / theirs


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2", help="an exported generation model")
    parser.add_argument("--triton", default="", help="the command that starts a real Triton")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--calls", type=int, default=2000, help="BLS calls of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
