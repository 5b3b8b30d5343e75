"""Serving: tokens per second and latencies of a running server, beside the bare forward loop.

    python benchmarks/serving.py --model-repository model_repository --model smollm2

starts `genserve serve`, lets `load.py` ask it in a closed loop at several concurrencies, and measures
`bare_loop.py` with as many rows in between, while the server is idle. Both run in every round, because
machines have fast and slow minutes; a row of the table is the median of the rounds, the share too.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
READY_S = 120
HEADINGS = ("streams", "tokens/s", "bare loop", "share", "first token", "inter-token")


def main() -> None:
    options = _options()
    port = _free_port()
    measured: dict[int, list[dict[str, float]]] = {c: [] for c in options.concurrency}
    with _server(options.model_repository, port=port):
        _load(options, port=port, concurrency=max(options.concurrency), seed=0)  # warm-up
        for number in range(1, options.rounds + 1):
            for concurrency in options.concurrency:
                figures = _round(options, port=port, concurrency=concurrency, seed=number)
                measured[concurrency].append(figures)
                _say(f"round {number}, concurrency {concurrency}: {figures['tokens_per_s']:.0f} tokens/s")
    rows = [{"concurrency": c, **_medians(rounds)} for c, rounds in measured.items()]
    _print_table(rows, options=options)
    if options.json:
        report = {"options": {k: str(v) for k, v in vars(options).items()}, "rows": rows, "rounds": measured}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _round(options: argparse.Namespace, *, port: int, concurrency: int, seed: int) -> dict[str, float]:
    """One load and one bare loop, one after the other: tokens per second, and times in milliseconds."""
    load = _load(options, port=port, concurrency=concurrency, seed=seed)
    bare = _run(
        "bare_loop.py",
        f"--repository={options.model_repository}",
        f"--model={options.model}",
        f"--rows={concurrency}",
        f"--prompt-tokens={round(statistics.fmean(load['prompt_tokens']))}",
        f"--new-tokens={options.new_tokens}",
    )
    tokens_per_s = sum(load["new_tokens"]) / load["elapsed_s"]
    return {
        "tokens_per_s": tokens_per_s,
        "bare_tokens_per_s": bare["tokens_per_s"],
        "share_of_bare": tokens_per_s / bare["tokens_per_s"],
        "first_token_p50_ms": _percentile(load["first_text_s"], 50) * 1e3,
        "first_token_p99_ms": _percentile(load["first_text_s"], 99) * 1e3,
        "inter_token_p50_ms": _percentile(load["gaps_s"], 50) * 1e3,
        "inter_token_p99_ms": _percentile(load["gaps_s"], 99) * 1e3,
        "client_cores": load["cpu_s"] / load["elapsed_s"],
    }


def _load(options: argparse.Namespace, *, port: int, concurrency: int, seed: int) -> dict[str, Any]:
    return _run(
        "load.py",
        f"--port={port}",
        f"--model={options.model}",
        f"--api={options.api}",
        f"--concurrency={concurrency}",
        f"--requests={max(4, options.waves * concurrency)}",
        f"--new-tokens={options.new_tokens}",
        f"--prompt-words={options.prompt_words}",
        # Without the process id, the next run would ask a server that has seen these prompts.
        f"--seed={os.getpid() * 1000 + seed * 100 + concurrency}",
    )


def _run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / script), *arguments]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return answer


@contextmanager
def _server(repository: Path, *, port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "genserve", "serve"]
    command += [f"--model-repository={repository}", f"--http-port={port}"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(process, port=port, log=log)
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)


def _wait_until_ready(process: subprocess.Popen[bytes], *, port: int, log: IO[bytes]) -> None:
    deadline_s = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    log.seek(0)
    sys.exit(f"the server is not ready:\n{log.read().decode(errors='replace')}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(measured[key] for measured in rounds) for key in rounds[0]}


def _print_table(rows: list[dict[str, float]], *, options: argparse.Namespace) -> None:
    table = Table(
        title=f"{options.model}: streaming {options.api}, {options.new_tokens} new tokens, greedy",
        caption=f"median of {options.rounds} rounds on {os.cpu_count()} cores; times: p50 / p99 in ms",
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['concurrency']}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['bare_tokens_per_s']:.0f}",
            f"{row['share_of_bare']:.0%}",
            f"{row['first_token_p50_ms']:.0f} / {row['first_token_p99_ms']:.0f}",
            f"{row['inter_token_p50_ms']:.1f} / {row['inter_token_p99_ms']:.1f}",
        )
    Console().print(table)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--api", choices=["chat", "generate"], default="chat")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waves", type=int, default=4, help="requests per connection and round")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-words", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write every round to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
