"""Runs simulations: `python -m tests.simulation --seed N --trace` replays one seed, `--seeds N` runs many."""

from __future__ import annotations

import argparse
import sys

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from genserve.machine import num_cores
from tests.simulation.runner import Summary, failure_line, simulate, summaries
from tests.simulation.virtual_threads import virtual_product


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    parser.add_argument("--seeds", type=int, default=1000, help="run so many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=num_cores())
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return _replay(arguments.seed, trace=arguments.trace)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    return _soak(seeds, num_processes=arguments.processes)


def _replay(seed: int, *, trace: bool) -> int:
    with virtual_product():
        outcome = simulate(seed, trace=print if trace else None)
    for problem in outcome.problems:
        print(problem)
    return bool(outcome.problems)


def _soak(seeds: range, *, num_processes: int) -> int:
    total = Summary()
    columns = TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        for part in summaries(seeds, num_processes=num_processes):
            total.merge(part)
            progress.advance(task, part.num_seeds)
            for outcome in part.failed:
                progress.console.print(failure_line(outcome), markup=False, soft_wrap=True)
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(total.faults.items()))
    hours = total.simulated_s / 3600
    print(f"{total.num_seeds} seeds, {total.num_requests} requests, {hours:.1f} simulated hours")
    print(f"{total.faults.total()} faults: {faults}")
    print(f"{len(total.failed)} seeds with violations")
    return bool(total.failed)


if __name__ == "__main__":
    sys.exit(main())
