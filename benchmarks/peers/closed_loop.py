"""Closed loop: requests to an engine in this process, as `load.py` sends them to a server.

The engines beside this file are scripts that their own Python runs: each loads a model, reads one JSON
object per line from standard input (the prompts, how many at once, how many tokens each), and writes what
it measured. It needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["Engine", "answer_standard_input", "closed_loop"]


class Engine(Protocol):
    """What is measured; it answers each request with exactly as many tokens as were asked for."""

    def add(self, number: int, prompt: str, *, new_tokens: int) -> int:
        """Take a request, which the caller knows by a number; returns the tokens of its prompt."""

    def step(self) -> Mapping[int, int]:
        """Do some work, or wait for it; returns how many tokens came, by the number of the request."""


def closed_loop(
    engine: Engine, prompts: Sequence[str], *, concurrency: int, new_tokens: int
) -> dict[str, Any]:
    """Keep `concurrency` requests in the engine until all are answered.

    Returns:
        The fields of `load.Measured`.
    """
    waiting = deque(enumerate(prompts))
    missing: dict[int, int] = {}        # tokens still to come, of those in the engine
    last_s: dict[int, float] = {}       # when it was sent, or its last token came
    prompt_tokens: list[int] = []
    first_text_s: list[float] = []
    gaps_s: list[float] = []
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    while waiting or missing:
        while waiting and len(missing) < concurrency:
            number, prompt = waiting.popleft()
            missing[number], last_s[number] = new_tokens, time.perf_counter()
            prompt_tokens.append(engine.add(number, prompt, new_tokens=new_tokens))
        arrived = engine.step()
        now_s = time.perf_counter()
        for number, count in arrived.items():
            waited_s = now_s - last_s[number]
            (first_text_s if missing[number] == new_tokens else gaps_s).append(waited_s)
            gaps_s.extend([0.0] * (count - 1))
            last_s[number] = now_s
            missing[number] -= count
            if not missing[number]:
                del missing[number]
    return {
        "elapsed_s": time.perf_counter() - started_s,
        "cpu_s": time.process_time() - cpu_started_s,
        "prompt_tokens": prompt_tokens,
        "new_tokens": [new_tokens] * len(prompts),
        "first_text_s": first_text_s,
        "gaps_s": gaps_s,
    }


def answer_standard_input(engine: Engine) -> None:
    """Run each load that comes in a line, and write what was measured in a line."""
    # What the libraries print must not stand between the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        print("{}", file=answers, flush=True)  # the model is loaded
        for line in sys.stdin:
            load = json.loads(line)
            measured = closed_loop(
                engine, load["prompts"], concurrency=load["concurrency"], new_tokens=load["new_tokens"]
            )
            print(json.dumps(measured), file=answers, flush=True)
