"""Bare loop: the forward passes of one batch and nothing else, the ceiling of what a server can reach.

The logits stage by itself, on the device that its config names: one forward of all prompts, then one call per
token with a constant token fed back. No sampling, no text, no network, no scheduling.

    python benchmarks/bare_loop.py --repository model_repository --model smollm2 --rows 32

prints one JSON object, with the fields of `load.Measured` that it has.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from genserve.repository.index import scan
from genserve.repository.logits_placement import logits_placement
from genserve.repository.logits_runtime import LoadedLogits, load_logits
from genserve.tuning.trial import even_batch

__all__ = ["bare_forward_loop"]

TOKEN_ID = 5  # any will do: its value does not change the cost


def bare_forward_loop(
    repository: Path, model: str, *, rows: int, prompt_tokens: int, new_tokens: int
) -> float:
    """Seconds for so many tokens of each row, the prompts included."""
    stage = scan([repository])[f"{model}_logits"]
    logits = load_logits(stage, placement=logits_placement(stage))
    work = {"rows": rows, "prompt_tokens": prompt_tokens}
    _run(logits, **work, new_tokens=3)  # the first runs pay for memory and weight layout
    started_s = time.perf_counter()
    _run(logits, **work, new_tokens=new_tokens)
    return time.perf_counter() - started_s


def _run(logits: LoadedLogits, *, rows: int, prompt_tokens: int, new_tokens: int) -> None:
    num_blocks = -(-(prompt_tokens + new_tokens) // logits.block_size)
    prompts, token_ids = np.full((rows, prompt_tokens), TOKEN_ID), np.full((rows, 1), TOKEN_ID)
    logits.forward(even_batch(prompts, num_computed=0, num_blocks=num_blocks))
    for length in range(prompt_tokens, prompt_tokens + new_tokens - 1):  # the prompt gave the first token
        logits.forward(even_batch(token_ids, num_computed=length, num_blocks=num_blocks))


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
