"""Serving: throughput and latencies of a server, compared with the bare forward loop and other engines.

    python benchmarks/serving.py --model-repository model_repository --model smollm2
    python benchmarks/serving.py --peer llama-server:PROGRAM:MODEL.gguf --peer openvino:PYTHON:FOLDER

starts `genserve serve` and each peer, and sends the same requests to all of them: in each round each load
runs on one after the other while the others are idle, because machines have fast and slow minutes. A figure
of the tables is the median of the rounds, a ratio the median of the ratios within the rounds.

Prompts are sent without a chat template. `genserve bench` measures servers over HTTP. `openvino`,
`onnxruntime-genai` and `engine` (genserve's engine; its model is a repository) are measured in their own
processes (`peers/closed_loop.py`), without HTTP and client. docs/measuring.md describes how to install the
peers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from zlib import crc32

from report import Figures, markdown, median, prefix_figures, ratio, serving_figures
from targets import PEERS, Measured, Target, Work, bare_loop, genserve

from genserve.machine import num_cores

GENSERVE, BARE = "genserve", "bare forward"
SERVING_HEADINGS = ("", "tokens/s", "speedup", "first token, together", "first token", "between tokens")
PREFIX_HEADINGS = ("", "first time", "second time", "sooner")
QUESTION_WORDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The measurements of one load."""

    title: str
    work: Work
    figures: Callable[[Measured], Figures]
    rounds: dict[str, list[Figures]] = field(default_factory=dict)  # the figures of each round, by target


def main() -> None:
    options = _options()
    servings = [_serving(options, words, c) for words in options.prompt_words for c in options.concurrency]
    prefixes = [_prefix(words) for words in options.prefix_words]
    with ExitStack() as stack:
        targets = dict(_targets(options, stack))
        for target in targets.values():
            target.measure(replace(servings[-1].work, new_tokens=8))  # warm-up
        bare = {BARE: bare_loop(options.model_repository, model=options.model)}
        for number in range(1, options.rounds + 1):
            for table in servings:
                _round(table, targets | bare, number=number, seed=options.seed)
            for table in prefixes:
                _round(table, targets, number=number, seed=options.seed)
    _print([*map(_serving_rows, servings), *map(_prefix_rows, prefixes)], options=options)
    if options.json:
        tables = [{"title": table.title, "rounds": table.rounds} for table in (*servings, *prefixes)]
        options.json.write_text(json.dumps({"arguments": sys.argv[1:], "tables": tables}, indent=2) + "\n")


def _targets(options: argparse.Namespace, stack: ExitStack) -> Iterator[tuple[str, Target]]:
    yield GENSERVE, stack.enter_context(genserve(options.model_repository, model=options.model))
    for kind, program, model in options.peer:
        yield f"{kind} {Path(model).name}", stack.enter_context(PEERS[kind](program, model))


def _serving(options: argparse.Namespace, words: int, concurrency: int) -> Table:
    return Table(
        title=f"concurrency {concurrency}, prompts of {words} words, {options.new_tokens} new tokens",
        work=Work(
            concurrency=concurrency,
            num_requests=max(4, options.waves * concurrency),
            new_tokens=options.new_tokens,
            prompt_words=words,
        ),
        figures=lambda measured: serving_figures(measured, concurrency=concurrency),
    )


def _prefix(words: int) -> Table:
    return Table(
        title=f"Time to first token of a prompt of {words} words and a question, and of the same words with "
        "another question",
        work=Work(
            concurrency=1,
            num_requests=2,
            new_tokens=8,
            prompt_words=words + QUESTION_WORDS,
            shared_words=words,
        ),
        figures=prefix_figures,
    )


def _round(table: Table, targets: Mapping[str, Target], *, number: int, seed: int) -> None:
    """Measure all targets one by one; each round starts with another target."""
    # The texts of different loads must differ from the start, or they would hit the engines' prefix caches.
    work = replace(table.work, seed=crc32(f"{seed} {number} {table.title}".encode()))
    ordered = list(targets.items())
    first = (number - 1) % len(ordered)
    for name, target in ordered[first:] + ordered[:first]:
        figures = table.figures(target.measure(work))
        table.rounds.setdefault(name, []).append(figures)
        summary = ", ".join(f"{key} {value:.1f}" for key, value in figures.items())
        print(f"round {number}, {table.title}: {name}: {summary}", file=sys.stderr, flush=True)


def _serving_rows(table: Table) -> tuple[str, str]:
    mine = table.rounds[GENSERVE]
    rows = [
        (
            name,
            _number(median(rounds, "tokens_per_s")),
            _share(ratio(mine, rounds, "tokens_per_s"), name),
            _number(median(rounds, "together_p50_ms")),
            _pair(rounds, "first"),
            _pair(rounds, "gap"),
        )
        for name, rounds in table.rounds.items()
    ]
    return table.title, markdown(SERVING_HEADINGS, rows)


def _prefix_rows(table: Table) -> tuple[str, str]:
    rows = [
        (
            name,
            _number(median(rounds, "cold_ms")),
            _number(median(rounds, "warm_ms")),
            f"{median(rounds, 'sooner') or 0:.1f}x",
        )
        for name, rounds in table.rounds.items()
    ]
    return table.title, markdown(PREFIX_HEADINGS, rows)


def _share(value: float | None, name: str) -> str:
    if value is None or name == GENSERVE:
        return ""
    return f"{value:.0%}" if name == BARE else f"{value:.2f}x"


def _pair(rounds: list[Figures], name: str) -> str:
    p50, p95 = (median(rounds, f"{name}_p{percent}_ms") for percent in (50, 95))
    return "" if p50 is None else f"{_number(p50)} / {_number(p95)}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value < 20 else f"{value:.0f}"


def _print(tables: list[tuple[str, str]], *, options: argparse.Namespace) -> None:
    for title, table in tables:
        print(f"\n{title}\n\n{table}")
    print(f"\nMedians of {options.rounds} rounds on {num_cores()} cores; times in ms: p50, or p50 / p95.")


def _peer(text: str) -> tuple[str, str, str]:
    kind, program, model = text.split(":")
    if kind not in PEERS:
        raise argparse.ArgumentTypeError(f"{kind!r} is not one of {', '.join(PEERS)}")
    return kind, program, model


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--peer",
        type=_peer,
        action="append",
        default=[],
        metavar="KIND:PROGRAM:MODEL",
        help=f"one of {', '.join(PEERS)}; the program is a server, or the Python that has the engine",
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-words", type=int, nargs="+", default=[40], help="a word is about a token")
    parser.add_argument("--prefix-words", type=int, nargs="*", default=[], help="also measure prefix reuse")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waves", type=int, default=4, help="requests per connection and round")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0, help="another seed yields other texts")
    parser.add_argument("--json", type=Path, help="write every round to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
