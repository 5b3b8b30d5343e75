"""BLS: the time of one call and the speed of the naive loop, compared with Triton.

    python benchmarks/bls.py --model-repository model_repository --triton tritonserver

serves the same model.py files (`benchmarks/models`) with `genserve serve` and with Triton, alternately in
each round, each alone on the machine:

*   `caller` calls `trivial` a few thousand times through BLS and reports the median time of a call;
*   `naive_loop` sends all its ids again for each token, greedy, at several concurrencies.

Triton computes the logits with the same exported graph, in a model.py with ONNX Runtime. Without `--triton`
the table has only genserve.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from servers import genserve_server, triton_server

from genserve.kernels import library_path

# Triton keeps the tensors of all calls in shared memory until the request ends.
CALLS_PER_REQUEST = 200
CALL = "call, us"
ATTEMPTS = 3

Server = Callable[[argparse.Namespace], AbstractContextManager[str]]
MODELS = Path(__file__).parent / "models"


def main() -> None:
    options = _options()
    servers: dict[str, Server] = {"genserve": _genserve}
    if options.triton:
        servers["triton"] = _triton
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    for number in range(1, options.rounds + 1):
        for name, server in servers.items():
            measured[name].append(_round(server, options=options, seed=number))
            print(f"round {number}, {name}: {_listed(measured[name][-1])}", flush=True)
    _print_table({name: _medians(rounds) for name, rounds in measured.items()}, options=options)
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")


def _round(server: Server, *, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Return all figures of one server, while no other server runs."""
    figures: dict[str, float] = {}
    for _ in range(ATTEMPTS):
        try:
            with server(options) as url:
                _loops(url, concurrency=1, options=options, seed=0)  # warm-up
                _measure(url, figures, options=options, seed=seed)
                return figures
        except OSError as error:
            print(f"the connection was lost ({error}); restarting the server for the rest", flush=True)
    raise SystemExit(f"the connection was lost {ATTEMPTS} times")


def _measure(url: str, figures: dict[str, float], *, options: argparse.Namespace, seed: int) -> None:
    """Add the missing figures."""
    if CALL not in figures:
        figures[CALL] = _call_us(url, count=options.calls)
    for concurrency in options.concurrency:
        name = f"loop x{concurrency}, tokens/s"
        if name not in figures:
            figures[name] = _loops(url, concurrency=concurrency, options=options, seed=seed)


def _call_us(url: str, *, count: int) -> float:
    """Return the median time of one BLS call of a trivial model, in microseconds."""
    inputs = [_tensor("COUNT", np.array([CALLS_PER_REQUEST], np.int32))]
    seconds = [_infer(url, "caller", inputs) for _ in range(count // CALLS_PER_REQUEST)]
    return statistics.median(itertools.chain(*seconds)) * 1e6


def _loops(url: str, *, concurrency: int, options: argparse.Namespace, seed: int) -> float:
    """Return the tokens per second of concurrent naive loops."""
    prompts = np.random.default_rng(seed).integers(100, 40_000, size=(concurrency, options.prompt_tokens))

    def generate(prompt: np.ndarray) -> int:
        inputs = [
            _tensor("input_ids", prompt[np.newaxis].astype(np.int64)),
            _tensor("max_tokens", np.array([options.max_tokens], np.int32)),
        ]
        return len(_infer(url, "naive_loop", inputs))

    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        num_tokens = sum(pool.map(generate, prompts))
    return num_tokens / (time.perf_counter() - started)


@contextmanager
def _genserve(options: argparse.Namespace) -> Iterator[str]:
    with _repository("caller", "trivial", "naive_loop") as folder:
        for path in options.model_repository.glob(f"{options.model}*"):
            (folder / path.name).symlink_to(path.resolve())
        _set_parameter(folder / "naive_loop", "logits_model", f"{options.model}_logits", was="onnx_logits")
        with genserve_server(folder) as ports:
            yield f"http://127.0.0.1:{ports.http}"


@contextmanager
def _triton(options: argparse.Namespace) -> Iterator[str]:
    with _repository("caller", "trivial", "naive_loop", "onnx_logits") as folder:
        stage = options.model_repository / f"{options.model}_logits"
        model = max(stage.glob("[1-9]*"), key=lambda version: int(version.name)) / "model.onnx"
        with (folder / "onnx_logits" / "config.pbtxt").open("a") as config:
            for key, value in {
                "model_path": model.resolve(),
                "site_packages": sysconfig.get_path("purelib"),
                "kernels": library_path(),
            }.items():
                config.write(f'parameters [ {{ key: "{key}" value: {{ string_value: "{value}" }} }} ]\n')
        with triton_server(options.triton, folder) as ports:
            yield f"http://127.0.0.1:{ports.http}"


@contextmanager
def _repository(*models: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            shutil.copytree(MODELS / name, Path(folder) / name)
        yield Path(folder)


def _set_parameter(model: Path, key: str, value: str, *, was: str) -> None:
    config = model / "config.pbtxt"
    config.write_text(config.read_text().replace(f'"{was}"', f'"{value}"'))


def _infer(url: str, model: str, inputs: list[dict[str, Any]]) -> list[float]:
    """Run a model with JSON inputs, and return its single output."""
    body = json.dumps({"inputs": inputs}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v2/models/{model}/infer", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        [output] = json.load(response)["outputs"]
    data: list[float] = output["data"]
    return data


def _tensor(name: str, array: np.ndarray) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(array.shape),
        "datatype": array.dtype.name.upper(),
        "data": array.reshape(-1).tolist(),
    }


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def _listed(figures: dict[str, float]) -> str:
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
    return theirs / ours if name == CALL else ours / theirs


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2", help="an exported text model")
    parser.add_argument("--triton", default="", help="the command that starts Triton")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--calls", type=int, default=2000, help="number of BLS calls per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
