"""Pipeline: a model in two stages of one thread each, beside the same model in one stage of two threads.

    python benchmarks/pipeline.py --model-repository model_repository

pulls the model in stages into a temporary folder, and measures both alternately: forwards of decodes and of a
prompt, with 1, 2, 4 ... micro-batches; the processor time of a run of each stage, from which follows what a
step would take on idle cores; 32 answers at a time from the engine; and the runs of two stages one after the
other, at the same time in two threads, and in two processes. Prints tables of medians in Markdown.
A ratio is the median of the ratios within the rounds, whose sides were measured within the same seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from batches import TOKEN_ID, forward_batch
from report import markdown

from genserve import LLM
from genserve.engine.logits_model import ForwardBatch, LogitsModel
from genserve.export import SilentProgress, pull
from genserve.textmodel.logits_config import pipeline_files
from genserve.textmodel.runtimes.kv_cache_memory import HostMemory, KVCache
from genserve.textmodel.runtimes.onnx_logits import LogitsGraph, OnnxLogits
from genserve.textmodel.runtimes.pipeline_logits import PipelineLogits, num_micro_batches

MICRO_BATCHES = (1, 2, 4, 8)
CONTEXT = 128  # tokens before a decode
MAX_LENGTH = 512
RUNS = 8  # runs of a stage, when two stages are measured at a time

Times = dict[str, list[float]]  # milliseconds in each round, by name


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        pull(options.model, repository=Path(folder), pipeline_stages=2, progress=SilentProgress())
        graph = Path(f"{options.model}_logits") / "1" / "model.onnx"
        files = pipeline_files(Path(folder) / graph, num_stages=2)
        tables = {
            "forwards": _forwards(options.model_repository / graph, files, rounds=options.rounds),
            "runs": _runs(options.model_repository / graph, files, rounds=options.rounds),
            "answers": _answers(options, Path(folder)),
            "overlap": _overlap(files, rounds=options.rounds),
        }
    if options.json:
        options.json.write_text(json.dumps(tables, indent=2))


def _forwards(whole: Path, files: Sequence[Path], *, rounds: int) -> dict[str, Times]:
    sizes = {"max_num_seqs": 32, "max_length": MAX_LENGTH}
    one = OnnxLogits(whole, num_threads=2, **sizes)
    measured = PipelineLogits(files, num_threads=1, **sizes)
    forwards = {
        f"{rows} decodes": forward_batch(one, [[TOKEN_ID]] * rows, past=[CONTEXT] * rows, length=CONTEXT + 1)
        for rows in (1, 8, 32)
    } | {"256 tokens of a prompt": forward_batch(one, [[TOKEN_ID] * 256], past=[0], length=256)}
    tables: dict[str, Times] = {}
    for name, batch in forwards.items():
        num_tokens = len(batch.token_ids)
        models: dict[str, LogitsModel] = {"one stage": one, "two stages": measured}
        for number in MICRO_BATCHES:
            if number <= num_tokens:
                size = -(-num_tokens // number)
                models[f"m = {number}"] = PipelineLogits(files, num_threads=1, max_micro_batch=size, **sizes)
        tables[name] = _timed({key: partial(model.forward, batch) for key, model in models.items()}, rounds)
        tables[name]["chosen"] = [num_micro_batches(measured._costs, num_tokens)]
    headings = ("forward", "one stage, ms", "two stages", "times", "chosen m")
    headings = (*headings, *(f"m = {m}" for m in MICRO_BATCHES))
    print(markdown(headings, [_forward_row(name, table) for name, table in tables.items()]))
    return tables


def _forward_row(name: str, table: Times) -> list[str]:
    return [
        name,
        _ms(table["one stage"]),
        _ms(table["two stages"]),
        f"x{_ratio(table['two stages'], table['one stage']):.2f}",
        f"{table['chosen'][0]:.0f}",
        *(_ms(table[key]) if (key := f"m = {m}") in table else "" for m in MICRO_BATCHES),
    ]


def _runs(whole: Path, files: Sequence[Path], *, rounds: int) -> dict[str, list[float]]:
    """Return the CPU time of the whole graph and of each stage, in one thread, by the number of tokens."""
    sizes = {"max_num_seqs": 32, "max_length": MAX_LENGTH}
    one = OnnxLogits(whole, num_threads=1, **sizes)
    staged = PipelineLogits(files, num_threads=1, max_micro_batch=MAX_LENGTH, **sizes)
    batches = {
        f"{rows} decodes": forward_batch(one, [[TOKEN_ID]] * rows, past=[CONTEXT] * rows, length=CONTEXT + 1)
        for rows in (1, 4, 8, 16, 32)
    } | {
        f"{length} tokens of a prompt": forward_batch(one, [[TOKEN_ID] * length], past=[0], length=256)
        for length in (32, 64, 128, 256)
    }
    table: dict[str, list[float]] = {}
    for name, batch in batches.items():
        times = [
            [_processor_ms(partial(one.forward, batch)), *_stage_ms(staged, batch)] for _ in range(rounds)
        ]
        table[name] = [min(column) for column in zip(*times, strict=True)]
    headings = ("processor time of a run, ms", "one graph", "stage 1", "stage 2")
    print(markdown(headings, [[name, *(f"{ms:.1f}" for ms in row)] for name, row in table.items()]))
    return table


def _stage_ms(staged: PipelineLogits, batch: ForwardBatch) -> list[float]:
    first, last = staged.graphs
    hidden = first.memory.rows(len(batch.token_ids), first.width, first.dtype)
    logits = last.memory.rows(len(batch.logits_indices), last.width, last.dtype)
    return [
        _processor_ms(partial(first.run, batch, hidden)),
        _processor_ms(partial(last.run, batch, logits, hidden_states=hidden)),
    ]


def _processor_ms(run: Callable[[], Any]) -> float:
    started_s = time.thread_time()
    run()
    return (time.thread_time() - started_s) * 1e3


def _answers(options: argparse.Namespace, staged: Path) -> dict[str, list[float]]:
    """Return the tokens per second of 32 answers at a time."""
    prompts = [f"{number}. Tell me a story of a fox who learns to swim." for number in range(32)]
    rates: dict[str, list[float]] = {"one stage": [], "two stages": []}
    texts = {}
    with (
        LLM(options.model, model_repository=options.model_repository) as one,
        LLM(options.model, model_repository=staged) as two,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):
        for number in range(options.rounds + 1):
            order = [("one stage", one), ("two stages", two)]
            for name, llm in order if number % 2 else order[::-1]:
                ask = partial(llm.chat, max_tokens=options.new_tokens, temperature=0)
                started_s = time.perf_counter()
                done = list(threads.map(ask, prompts))
                seconds = time.perf_counter() - started_s
                texts[name] = [answer.text for answer in done]
                if number:  # the first round warms up
                    rates[name].append(sum(a.usage.completion_tokens for a in done) / seconds)
    same = "yes" if texts["one stage"] == texts["two stages"] else "NO"
    row = [
        f"{statistics.median(rates['one stage']):.0f}",
        f"{statistics.median(rates['two stages']):.0f}",
        f"x{_ratio(rates['two stages'], rates['one stage']):.2f}",
        same,
    ]
    print(markdown(("32 answers: one stage, tokens/s", "two stages", "rates", "same texts"), [row]))
    return rates


def _overlap(files: Sequence[Path], *, rounds: int) -> dict[str, Times]:
    """Measure both stages, each with a batch of its own, in turn and at the same time."""
    tables = {}
    spawn = multiprocessing.get_context("spawn")
    with ThreadPoolExecutor(2) as threads, ProcessPoolExecutor(2, mp_context=spawn) as processes:
        for rows in (1, 8, 32):
            tables[f"{rows} decodes"] = _timed(
                {
                    "in turn": partial(_in_turn, files, rows),
                    "two threads": partial(_both, threads, files, rows),
                    "two processes": partial(_both, processes, files, rows),
                },
                rounds,
            )
    names = ("in turn", "two threads", "two processes")
    rows = [
        [name, *(_ms([t / RUNS for t in table[kind]]) for kind in names),
         f"x{_ratio(table['two threads'], table['two processes']):.2f}"]
        for name, table in tables.items()
    ]  # fmt: skip
    print(markdown(("a run of each stage, ms", *names, "threads / processes"), rows))
    return tables


def _in_turn(files: Sequence[Path], rows: int) -> None:
    for stage in (0, 1):
        _run_stage(files, stage, rows)


def _both(executor: Executor, files: Sequence[Path], rows: int) -> None:
    for future in [executor.submit(_run_stage, files, stage, rows) for stage in (0, 1)]:
        future.result()


def _run_stage(files: Sequence[Path], stage: int, rows: int) -> None:
    """Run a stage several times; a process opens it at its first run."""
    graph, batch, hidden, output = _stage(tuple(files), stage, rows)
    for _ in range(RUNS):
        graph.run(batch, output, hidden_states=hidden)


@cache
def _stage(files: tuple[Path, ...], stage: int, rows: int) -> tuple[LogitsGraph, ForwardBatch, Any, Any]:
    memory = HostMemory()
    graph = LogitsGraph(files[stage], num_threads=1, memory=memory, stage=stage + 1, num_stages=len(files))
    width = -(-(CONTEXT + 1) // memory.block_size)
    graph.bind_cache(
        KVCache(
            {
                name: memory.zeros((rows * width, memory.block_size, *shape), dtype)
                for name, (shape, dtype) in graph.token_shapes.items()
            }
        )
    )
    batch = ForwardBatch.of(
        [[TOKEN_ID]] * rows,
        num_computed_tokens=[CONTEXT] * rows,
        block_table=np.arange(rows * width).reshape(rows, width),
    )
    hidden = memory.rows(rows, 576, np.dtype(np.float32)) if stage else None
    if stage:
        hidden[:] = 1
    return graph, batch, hidden, memory.rows(rows, graph.width, graph.dtype)


def _timed(runs: dict[str, Callable[[], Any]], rounds: int) -> Times:
    times: Times = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in runs if number % 2 else [*runs][::-1]:
            started_s = time.perf_counter()
            runs[name]()
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - started_s) * 1e3)
    return times


def _ms(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f}"


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(time / other for time, other in zip(times, others, strict=True))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2", help="as `genserve pull` knows it")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
