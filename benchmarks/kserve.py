"""KServe: inferences per second over HTTP and gRPC, compared with Triton and the same Python model.

    python benchmarks/kserve.py --triton tritonserver

serves `benchmarks/models/echo` with `genserve serve` and with Triton, and sends requests to both alternately
with `kserve_load.py`: 64 x 512 floats in binary, and a tiny tensor. A figure is the median of the rounds, the
ratio the median of the rounds' ratios, because machines have fast and slow minutes. Without `--triton` the
table has only genserve; `--triton-urls HTTP GRPC` uses a running Triton that serves `echo`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from servers import Ports, genserve_server, triton_server

from genserve.machine import num_cores

HERE = Path(__file__).parent
SHAPES = {"64x512": (64, 512), "1x4": (1, 4)}
PROTOCOLS = ("http", "grpc")

Rounds = dict[str, list[float]]  # requests per second in each round, by the name of the server


def main() -> None:
    options = _options()
    measured: dict[str, Rounds] = {}
    with ExitStack() as stack:
        servers = {"genserve": stack.enter_context(_genserve())}
        if options.triton_urls:
            servers["triton"] = dict(zip(PROTOCOLS, options.triton_urls, strict=True))
        elif options.triton:
            servers["triton"] = stack.enter_context(_triton(options.triton))
        for number in range(1, options.rounds + 1):
            for protocol in options.protocol:
                for shape in SHAPES:
                    rounds = measured.setdefault(f"{protocol}, {shape}", {})
                    for name, addresses in servers.items():
                        figure = _load(addresses[protocol], protocol, shape=shape, options=options)
                        rounds.setdefault(name, []).append(figure)
                        case = f"round {number}, {protocol}, {shape}, {name}"
                        print(f"{case}: {figure:.0f} requests/s", flush=True)
    _print_table(measured, options=options)
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")


@contextmanager
def _genserve() -> Iterator[dict[str, str]]:
    with _repository() as repository, genserve_server(repository) as ports:
        yield _addresses(ports)


@contextmanager
def _triton(command: str) -> Iterator[dict[str, str]]:
    with _repository() as repository, triton_server(command, repository) as ports:
        yield _addresses(ports)


@contextmanager
def _repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(HERE / "models" / "echo", Path(folder) / "echo")
        yield Path(folder)


def _addresses(ports: Ports) -> dict[str, str]:
    return {"http": f"127.0.0.1:{ports.http}", "grpc": f"127.0.0.1:{ports.grpc}"}


def _load(address: str, protocol: str, *, shape: str, options: argparse.Namespace) -> float:
    command = [sys.executable, str(HERE / "kserve_load.py"), f"--protocol={protocol}", f"--address={address}"]
    command += ["--shape", *map(str, SHAPES[shape])]
    command += [f"--concurrency={options.concurrency}", f"--seconds={options.seconds}"]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    figure: float = json.loads(answer)["requests_per_s"]
    return figure


def _print_table(measured: dict[str, Rounds], *, options: argparse.Namespace) -> None:
    table = Table(
        title=f"KServe infer, requests/s, concurrency {options.concurrency}",
        caption=f"median of {options.rounds} rounds on {num_cores()} cores, shared with the client",
    )
    for heading in ("", *next(iter(measured.values())), "genserve / triton"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case, rounds in measured.items():
        medians = (f"{statistics.median(figures):.0f}" for figures in rounds.values())
        table.add_row(case, *medians, _ratio(rounds))
    Console().print(table)


def _ratio(rounds: Rounds) -> str:
    if "triton" not in rounds:
        return ""
    ratios = [ours / theirs for ours, theirs in zip(rounds["genserve"], rounds["triton"], strict=True)]
    return f"{statistics.median(ratios):.2f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--triton", help="the command of Triton, for instance `tritonserver`")
    parser.add_argument("--triton-urls", nargs=2, metavar=("HTTP", "GRPC"), help="of a running Triton")
    parser.add_argument("--protocol", choices=PROTOCOLS, nargs="+", default=PROTOCOLS)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="per load")
    parser.add_argument("--json", type=Path, help="write the figures of all rounds to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
