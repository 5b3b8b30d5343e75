"""Bare loop: the forward passes of one batch alone, the upper bound of a server's throughput.

The logits stage runs on the device of its config: one prefill of all rows, then one call per token with a
constant token. There is no sampling, text, network or scheduling.

    python benchmarks/bare_loop.py --repository model_repository --model smollm2 --rows 32

prints one JSON object with some fields of `targets.Measured`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from batches import TOKEN_ID, forward_batch

from genserve.repository.index import scan
from genserve.repository.model_loader import load_stage_logits
from genserve.textmodel.logits_runtime import LoadedLogits

__all__ = ["bare_forward_loop"]


def bare_forward_loop(
    repository: Path, model: str, *, rows: int, prompt_tokens: int, new_tokens: int
) -> float:
    """Return the seconds to generate `new_tokens` per row, including the prefill."""
    stage = scan([repository])[f"{model}_logits"]
    logits = load_stage_logits(stage)
    work = {"rows": rows, "prompt_tokens": prompt_tokens}
    _run(logits, **work, new_tokens=3)  # warm up memory and weight layouts
    started_s = time.perf_counter()
    _run(logits, **work, new_tokens=new_tokens)
    return time.perf_counter() - started_s


def _run(logits: LoadedLogits, *, rows: int, prompt_tokens: int, new_tokens: int) -> None:
    length = prompt_tokens + new_tokens
    prompts = [[TOKEN_ID] * prompt_tokens] * rows
    logits.forward(forward_batch(logits, prompts, past=[0] * rows, length=length))
    for past in range(prompt_tokens, length - 1):  # the prefill yields the first token
        logits.forward(forward_batch(logits, [[TOKEN_ID]] * rows, past=[past] * rows, length=length))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    elapsed_s = bare_forward_loop(**vars(options))
    new_tokens = [options.new_tokens] * options.rows
    print(json.dumps({"elapsed_s": elapsed_s, "new_tokens": new_tokens, "first_text_s": [], "gaps_s": []}))


if __name__ == "__main__":
    main()
