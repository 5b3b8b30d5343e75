"""Runtimes: the time of a step in each format of one model, measured alternately.

    genserve export SOURCE --name onnx --precision fp32
    genserve export SOURCE --name torch --format torchscript
    OMP_NUM_THREADS=1 python benchmarks/runtimes.py --models onnx torch

prints, by the number of rows, the CPU milliseconds of a prefill of 40 tokens and of a decode of one token,
medians of all rounds. With one thread this is the time of a step on an idle core, even on a busy machine. The
configs must set one thread: `intra_op_thread_count` "1", or `INTRA_OP_THREAD_COUNT`.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from batches import TOKEN_ID, forward_batch

from genserve.repository.index import scan
from genserve.repository.model_loader import load_stage_logits
from genserve.textmodel.logits_runtime import LoadedLogits

PROMPT_TOKENS, NEW_TOKENS = 40, 6


def round_of(logits: LoadedLogits, rows: int) -> dict[str, list[float]]:
    """Return the CPU milliseconds of a prefill and of several decodes."""
    length = PROMPT_TOKENS + NEW_TOKENS
    prefill = forward_batch(logits, [[TOKEN_ID] * PROMPT_TOKENS] * rows, past=[0] * rows, length=length)
    decodes = [
        forward_batch(logits, [[TOKEN_ID]] * rows, past=[past] * rows, length=length)
        for past in range(PROMPT_TOKENS, length)
    ]
    return {
        "prefill": [cpu_ms(lambda: logits.forward(prefill))],
        "decode": [cpu_ms(lambda decode=decode: logits.forward(decode)) for decode in decodes],
    }


def cpu_ms(call: Callable[[], object]) -> float:
    started_s = time.process_time()
    call()
    return (time.process_time() - started_s) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    entries = scan([options.repository])
    loaded = {model: load_stage_logits(entries[f"{model}_logits"]) for model in options.models}
    times: defaultdict[tuple[int, str, str], list[float]] = defaultdict(list)
    for number in range(options.rounds + 1):
        for rows in options.rows:
            for model, logits in loaded.items():
                for step, measured in round_of(logits, rows).items():
                    if number:  # the first round warms up memory and weight layouts
                        times[rows, step, model] += measured
    for rows in options.rows:
        for step in ("prefill", "decode"):
            figures = {model: median(times[rows, step, model]) for model in loaded}
            first = figures[options.models[0]]
            texts = (f"{model} {ms:.1f} ({ms / first:.2f}x)" for model, ms in figures.items())
            print(f"{rows} rows, {step}, CPU ms: {', '.join(texts)}")


if __name__ == "__main__":
    main()
