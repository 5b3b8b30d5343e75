"""Closed loop: sends requests to an engine in this process, like `genserve bench` to a server.

The engines in this folder are scripts, run by the Python that has them installed. Each loads a model, reads
a load from each line of standard input (JSON: prompts, concurrency, new tokens), and writes the
measurements. This file needs only the standard library.
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
    """A measured engine; it generates exactly `new_tokens` tokens per request."""

    def add(self, number: int, prompt: str, *, new_tokens: int) -> int:
        """Add a request, identified by a number; return the number of its prompt tokens."""

    def step(self) -> Mapping[int, int]:
        """Do or await some work; return the number of new tokens by request number."""


def closed_loop(
    engine: Engine, prompts: Sequence[str], *, concurrency: int, new_tokens: int
) -> dict[str, Any]:
    """Keep `concurrency` requests in the engine until all are answered.

    Returns:
        Raw measurements (`Measured` of targets.py).
    """
    waiting = deque(enumerate(prompts))
    missing: dict[int, int] = {}        # remaining tokens of each running request
    last_s: dict[int, float] = {}       # when each request got its last token, or started
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
    """Run the load of each line, and write its measurements in a line."""
    # The output of libraries goes to stderr, so that it does not mix with the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        print("{}", file=answers, flush=True)  # reports that the model is loaded
        for line in sys.stdin:
            load = json.loads(line)
            measured = closed_loop(
                engine, load["prompts"], concurrency=load["concurrency"], new_tokens=load["new_tokens"]
            )
            print(json.dumps(measured), file=answers, flush=True)
