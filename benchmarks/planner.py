"""Planner: what `genserve plan` predicts for loads on this machine, beside what a server measures.

    python benchmarks/planner.py --model-repository model_repository --model smollm2

The server has the first core of this process and the load generator the last one, so that they do not share
any, and `genserve tune`'s steps are measured on the server's core. Requests come as a Poisson process at a
share of the capacity; each round runs every load once. The trace of each run, its arrivals and lengths as
the server counted them, is simulated, and its figures are compared with the measured ones. Drafts are
switched off in a copy of the repository: the planner knows none.

What serving costs besides the steps is measured before the loads, as by `genserve tune --step-times`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx2
import numpy as np
from report import markdown
from servers import genserve_server

from genserve.bench.answers import LoadResult
from genserve.bench.datasets import RandomLengths, random_dataset, server_counter
from genserve.bench.dialects import DIALECTS, Requested
from genserve.bench.load_generator import Load, Target, run_load
from genserve.bench.load_plan import arrival_times
from genserve.bench.summary import inter_token_latencies_s
from genserve.planner.fleet import Fleet, FleetResult
from genserve.planner.loads import Lengths, PlannedRequest, SyntheticLoad
from genserve.planner.serving_cost import measure_serving_cost
from genserve.planner.simulated_replica import ReplicaKind
from genserve.planner.step_model import StepModel
from genserve.repository.options import RepositoryOptions
from genserve.tuning.engine_steps import measure_engine
from genserve.tuning.measured_steps import MeasuredEngine

HEADINGS = ("load", "measured", "predicted", "ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a load, measured or predicted."""

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


def main() -> None:
    options = _options()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        repository = _without_drafts(options.model_repository, Path(folder) / "models")
        with _on_core(cores[0]):
            engine = measure_engine(options.model, repository=repository, budget_s=options.tune_s)
        kind = _kind(engine)
        errors = np.abs(kind.step_model.errors)
        _report(f"step model: median error {np.median(errors):.1%}, largest {errors.max():.1%}")
        command = ("taskset", "-c", str(cores[0]), sys.executable, "-m", "genserve")
        with _on_core(cores[-1]), genserve_server(repository, command=command) as server:
            lengths = RandomLengths(
                input_len=options.input_len, output_len=options.output_len, range_ratio=0.5
            )
            load = _Loads(server.http, model=options.model, lengths=lengths, seed=options.seed)
            kind = replace(kind, serving=measure_serving_cost(engine, url=load.url))
            _report(f"serving: {kind.serving}")
            rates = {share: share * _capacity(kind, lengths) for share in options.share}
            rounds: dict[float, list[tuple[Figures, Figures]]] = {share: [] for share in rates}
            for number in range(options.rounds):
                for share, rate in rates.items():
                    result = load.open_loop(rate=rate, seconds=options.seconds, number=number)
                    pair = (_measured(result), _predicted(result, kind))
                    _report(f"{share:.0%}, round {number}: {pair}")
                    rounds[share].append(pair)
    _print(rounds, rates)
    if options.json:
        document = {f"{share:g}": [list(map(asdict, pair)) for pair in rounds[share]] for share in rounds}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


class _Loads:
    """Sends loads to a server, from this process."""

    def __init__(self, port: int, *, model: str, lengths: RandomLengths, seed: int) -> None:
        self.url = url = f"http://127.0.0.1:{port}"
        self._target = Target(
            base_url=url,
            dialect=DIALECTS["openai"],
            requested=Requested(model=model, temperature=0.0, ignore_eos=True),
        )
        self._seed = seed
        with httpx2.Client(base_url=url) as http:
            self._prompts = random_dataset(lengths, seed=seed, counter=server_counter(http, model=model))

    def open_loop(self, *, rate: float, seconds: float, number: int) -> LoadResult:
        count = max(1, round(rate * seconds))
        rng = np.random.default_rng([self._seed, number, count])
        arrivals_s = arrival_times(count, rate=rate, burstiness=1.0, rng=rng)
        result = LoadResult()
        run_load(Load(prompts=self._prompts, arrivals_s=arrivals_s), self._target, result)
        if result.failures():
            raise SystemExit(f"requests failed: {result.failures()[0]}")
        return result


def _kind(engine: MeasuredEngine) -> ReplicaKind:
    limits = engine.limits
    options = RepositoryOptions(max_queue_tokens=None, max_queue_wait_s=10.0)
    return ReplicaKind(
        limits=limits,
        step_model=StepModel(engine.steps, max_tokens=limits.max_num_batched_tokens),
        serving=engine.serving,
        queue_limits=options.queue_limits(limits.num_blocks * limits.block_size),
    )


def _capacity(kind: ReplicaKind, lengths: RandomLengths) -> float:
    """Return how many requests per second the simulated server answers when more arrive."""
    limits = replace(kind.queue_limits, max_requests=1 << 20, max_tokens=None, max_wait_s=None)
    load = SyntheticLoad(
        num_requests=400,
        rate=1000.0,
        input_len=Lengths(mean=lengths.input_len),
        output_len=Lengths(mean=lengths.output_len),
    )
    result = Fleet(replace(kind, queue_limits=limits), num_replicas=1).run(load.requests())
    return result.num_requests / result.duration_s


def _measured(result: LoadResult) -> Figures:
    first_s = [answer.first_text_s for answer in result.answers if answer.first_text_s is not None]
    gaps_s = inter_token_latencies_s(result.answers)
    return Figures(
        tokens_per_s=sum(answer.num_tokens for answer in result.answers) / result.elapsed_s,
        ttft_p50_ms=float(np.percentile(first_s, 50)) * 1e3,
        ttft_p99_ms=float(np.percentile(first_s, 99)) * 1e3,
        itl_p50_ms=float(np.percentile(gaps_s, 50)) * 1e3,
        itl_p99_ms=float(np.percentile(gaps_s, 99)) * 1e3,
    )


def _predicted(result: LoadResult, kind: ReplicaKind) -> Figures:
    simulated: FleetResult = Fleet(kind, num_replicas=1).run(_trace(result))
    # The clock of a load starts before its first request.
    duration_s = simulated.duration_s + result.answers[0].sent_s - result.started_s
    times = simulated.times
    return Figures(
        tokens_per_s=times.num_tokens / duration_s,
        ttft_p50_ms=times.first_s(50) * 1e3,
        ttft_p99_ms=times.first_s(99) * 1e3,
        itl_p50_ms=times.gap_s(50) * 1e3,
        itl_p99_ms=times.gap_s(99) * 1e3,
    )


def _trace(result: LoadResult) -> Iterator[PlannedRequest]:
    first = 0
    for answer in sorted(result.answers, key=lambda answer: answer.sent_s):
        assert answer.prompt_tokens is not None
        prompt = range(first, first + answer.prompt_tokens)
        new = range(prompt.stop, prompt.stop + answer.num_tokens)
        first = new.stop
        yield PlannedRequest(arrived_s=answer.sent_s - result.started_s, prompt=(prompt,), answer=new)


def _print(rounds: dict[float, list[tuple[Figures, Figures]]], rates: dict[float, float]) -> None:
    for name, title in (
        ("tokens_per_s", "tokens/s"),
        ("ttft_p50_ms", "first token p50, ms"),
        ("ttft_p99_ms", "first token p99, ms"),
        ("itl_p50_ms", "between tokens p50, ms"),
        ("itl_p99_ms", "between tokens p99, ms"),
    ):
        print(f"\n{title}\n")
        print(markdown(HEADINGS, [_row(share, rates[share], pairs, name) for share, pairs in rounds.items()]))


def _row(share: float, rate: float, pairs: Sequence[tuple[Figures, Figures]], name: str) -> list[str]:
    measured, predicted = ([getattr(pair[side], name) for pair in pairs] for side in (0, 1))
    ratio = statistics.median(p / m for m, p in zip(measured, predicted, strict=True))
    values = [f"{statistics.median(side):.1f}" for side in (measured, predicted)]
    return [f"{share:.0%} of the capacity: {rate:.2f} requests/s", *values, f"{ratio:.2f}"]


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _without_drafts(repository: Path, copy: Path) -> Path:
    """Copy the repository, with `speculation: "none"` in the configs of its logits stages."""
    shutil.copytree(repository, copy)
    for path in copy.glob("*_logits/config.pbtxt"):
        text = re.sub(r'^.*key: "speculation".*$', "", path.read_text(), flags=re.MULTILINE)
        path.write_text(text + 'parameters [ { key: "speculation" value: { string_value: "none" } } ]\n')
    return copy


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Run this process, and the threads that it starts in the block, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _options() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--share", type=float, nargs="+", default=[0.3, 0.6, 0.85], help="of the capacity")
    parser.add_argument("--input-len", type=int, default=96, help="tokens, times 0.5 to 1.5")
    parser.add_argument("--output-len", type=int, default=64, help="likewise")
    parser.add_argument("--seconds", type=float, default=45.0, help="of a load")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tune-s", type=float, default=60.0, help="to measure steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all rounds to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
