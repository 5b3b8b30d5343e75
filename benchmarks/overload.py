"""Overload: the throughput with more clients than slots, compared with as many clients as slots.

    python benchmarks/overload.py --model-repository model_repository --model smollm2

starts `genserve serve` and loads it alternately with as many streaming clients as it has slots (its
capacity), and with many more. Each client sends its next request when its answer is complete, and repeats a
rejected one after `retry-after-ms`. The figures are tokens per second,
and tokens per second of the server's CPU time, which is more reliable on a busy machine. A figure is the
median of the rounds, a share the median of their shares.

`--serve` passes a flag to the server: `--serve=--max-queue=0`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from zlib import crc32

import numpy as np
from report import Figures, markdown, median, ratio
from targets import Measured, Target, Work, genserve

from genserve.backends.onnx_session import num_cores

HEADINGS = (
    *("clients", "tokens/s", "of capacity", "tokens/CPU s", "of capacity", "rejected"),
    *("first token, ms: p50", "p99", "rejection, ms: p50", "p99"),
)

NUM_PROMPTS = 2000      # afterwards they repeat
# The time for the server to notice that the clients of the previous load have left.
SETTLE_S = 2


def main() -> None:
    options = _options()
    rounds: dict[int, list[Figures]] = {clients: [] for clients in (options.slots, *options.clients)}
    repository, flags = options.model_repository, options.serve
    with genserve(repository, model=options.model, backend=options.backend, flags=flags) as target:
        # The warm-up also lets the server measure its speed.
        target.measure(_work(options, clients=max(rounds), number=0))
        for number in range(1, options.rounds + 1):
            # The order alternates, to be fair on a machine that slows down.
            for clients in sorted(rounds, reverse=number % 2 == 0):
                rounds[clients].append(_measure(target, options, clients=clients, number=number))
    print(f"\n{_table(rounds, capacity=options.slots)}")
    print(
        f"\nMedians of {options.rounds} rounds on {num_cores()} cores; {options.backend}, prompts of "
        f"{options.prompt_words} words, {options.new_tokens} new tokens."
    )
    if options.json:
        options.json.write_text(json.dumps({"arguments": sys.argv[1:], "rounds": rounds}, indent=2) + "\n")


def _measure(target: Target, options: argparse.Namespace, *, clients: int, number: int) -> Figures:
    time.sleep(SETTLE_S)
    figures = overload_figures(target.measure(_work(options, clients=clients, number=number)))
    summary = ", ".join(f"{key} {value:.3g}" for key, value in figures.items())
    print(f"round {number}, {clients} clients: {summary}", file=sys.stderr, flush=True)
    return figures


def _work(options: argparse.Namespace, *, clients: int, number: int) -> Work:
    return Work(
        concurrency=clients,
        num_requests=NUM_PROMPTS,
        duration_s=options.seconds,
        new_tokens=options.new_tokens,
        prompt_words=options.prompt_words,
        seed=crc32(f"{options.seed} {number} {clients}".encode()),
    )


def overload_figures(measured: Measured) -> Figures:
    """Summarise raw measurements (`targets.Measured`); times in milliseconds."""
    first_s, rejected_s = measured["first_text_s"], measured["rejected_s"]
    # A text is a token. With more clients than slots, answers do not end together, so that the tokens of
    # unfinished ones would be missing only on one side of the comparison.
    num_tokens = sum(measured["new_tokens"]) + measured["unfinished_tokens"]
    num_sent = len(first_s) + len(rejected_s)
    figures = {
        "tokens_per_s": num_tokens / measured["elapsed_s"],
        "rejected": len(rejected_s) / num_sent,
        "client_cpu": measured["cpu_s"] / measured["elapsed_s"],
    }
    if "server_cpu_s" in measured:
        figures["tokens_per_cpu_s"] = num_tokens / measured["server_cpu_s"]
    for name, times_s in (("first", first_s), ("rejection", rejected_s)):
        if times_s:
            p50, p99 = np.percentile(times_s, (50, 99)) * 1e3
            figures |= {f"{name}_p50_ms": float(p50), f"{name}_p99_ms": float(p99)}
    return figures


def _table(rounds: dict[int, list[Figures]], *, capacity: int) -> str:
    rows = []
    for clients, mine in rounds.items():
        speeds = []
        for name in ("tokens_per_s", "tokens_per_cpu_s"):
            speed, share = median(mine, name), ratio(mine, rounds[capacity], name)
            speeds += ["", ""] if speed is None or share is None else [f"{speed:.0f}", f"{share:.0%}"]
        times = (
            median(mine, f"{name}_p{percent}_ms") for name in ("first", "rejection") for percent in (50, 99)
        )
        rows.append(
            (
                str(clients),
                *speeds,
                f"{median(mine, 'rejected'):.0%}",
                *("" if time is None else f"{time:.0f}" for time in times),
            )
        )
    return markdown(HEADINGS, rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", choices=("openai-chat", "openai", "tgi"), default="openai-chat")
    parser.add_argument("--slots", type=int, default=32, help="max_batch_size of its logits stage")
    parser.add_argument("--clients", type=int, nargs="+", default=[200])
    parser.add_argument("--prompt-words", type=int, default=40, help="a word is about a token")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20, help="of a round")
    parser.add_argument("--serve", action="append", default=[], metavar="FLAG", help="for `genserve serve`")
    parser.add_argument("--seed", type=int, default=0, help="another seed yields other texts")
    parser.add_argument("--json", type=Path, help="write every round to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
