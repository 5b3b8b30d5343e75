"""Prefix restart: the first token of a long prompt that is cached, and what the prefix cache on disk costs.

    python benchmarks/prefix_restart.py --model-repository model_repository

starts `genserve serve --prefix-cache-dir` with an empty folder, sends `--rounds` prompts of `--tokens` tokens
twice, stops the server, starts another one on the folder and sends it the prompts again. Prints the medians
of the time to first token: computed, from memory and from disk. Fails unless all answers to a prompt have the
same tokens and log-probabilities. Then runs a server with a folder and one without it side by side, sends
both new prompts in turns, and prints how much longer the one with the folder takes for prompt and answer;
with `--cost-rounds 0` it does not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from report import markdown
from servers import Running, genserve_server, measured_in_turns

ANSWER_TOKENS = 32


def main() -> None:
    options = _options()
    prompts = [_prompt(options.tokens, seed=seed) for seed in range(options.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--prefix-cache-dir={folder}"]
        runs = []
        for num_times in (2, 1):
            with genserve_server(options.model_repository, flags=flags) as server:
                _ask(server, _prompt(64, seed=-1))      # the first request of a process is slower
                runs += [[_ask(server, prompt) for prompt in prompts] for _ in range(num_times)]
    computed, *cached = ([answer for _, answer in run] for run in runs)
    if any(answers != computed for answers in cached):
        raise SystemExit("an answer to a cached prompt has other tokens or log-probabilities")
    computed_s, *cached_s = (statistics.median(seconds for seconds, _ in run) for run in runs)
    row = [str(options.tokens), f"{computed_s * 1e3:.0f}"]
    row += [text for s in cached_s for text in (f"{s * 1e3:.0f}", f"{computed_s / s:.1f}")]
    titles = ("tokens", "computed, ms", "from memory, ms", "sooner by", "from disk, ms", "sooner by")
    print(markdown(titles, [row]))
    if options.cost_rounds:
        print(_cost(options))


def _cost(options: argparse.Namespace) -> str:
    """Return a table of how long servers with and without a folder take for new prompts."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {
            name: stack.enter_context(genserve_server(options.model_repository, flags=flags))
            for name, flags in (("off", []), ("on", [f"--prefix-cache-dir={folder}"]))
        }
        seeds = {name: count(1000) for name in ("off", "on")}
        names = {server.pid: name for name, server in servers.items()}

        def seconds(server: Running) -> float:
            prompt = _prompt(options.cost_tokens, seed=next(seeds[names[server.pid]]))
            started_s = time.perf_counter()
            _ask(server, prompt)
            return time.perf_counter() - started_s

        figures = measured_in_turns(servers, seconds, rounds=options.cost_rounds + 1)
    off, on = (figures[name][1:] for name in ("off", "on"))
    ratios = [b / a for a, b in zip(off, on, strict=True)]
    row = [f"{statistics.median(off) * 1e3:.0f}", f"{statistics.median(on) * 1e3:.0f}"]
    row.append(f"{(statistics.median(ratios) - 1) * 100:+.1f} %")
    return markdown(("off, ms", "on, ms", "median of the ratios"), [row])


def _prompt(num_tokens: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 300) for _ in range(num_tokens)]


def _ask(server: Running, prompt: Sequence[int]) -> tuple[float, Any]:
    """Return the seconds to the first token, and the answer's tokens with their log-probabilities."""
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": 1, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True}
    first_s = 0.0
    token_ids, logprobs = [], []    # a step may yield several tokens, or one
    started_s = time.perf_counter()
    url = f"http://127.0.0.1:{server.http}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=600) as got:
        got.raise_for_status()
        for line in got.iter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter() - started_s
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                token_ids += choice["token_ids"]
                logprobs += choice["logprobs"]["token_logprobs"]
    assert len(token_ids) == len(logprobs) == ANSWER_TOKENS
    return first_s, (token_ids, logprobs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cost-tokens", type=int, default=512)
    parser.add_argument("--cost-rounds", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
