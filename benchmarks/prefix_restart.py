"""Prefix restart: the first token of a long prompt that is cached, and what the prefix cache on disk costs.

    python benchmarks/prefix_restart.py --model-repository model_repository

starts `genserve serve --prefix-cache-dir` with an empty folder, sends `--rounds` prompts of `--tokens` tokens
twice, stops the server, starts another one on the folder and sends it the prompts again. Prints the medians
of the time to first token: computed, from memory and from disk. Fails unless all answers to a prompt have the
same tokens and log-probabilities. Then runs a server with a folder and two without it side by side. All have
the same 8 conversations of three turns at once, one server after the other at each turn: a system prompt of
`--cost-tokens` tokens that all share, messages of half as many, and answers of 32 tokens. `--cost-rounds`
such sets of conversations follow each other. Prints how much more time for its answers, and CPU time of the
process until their blocks are written, the server with the folder takes for a turn than one without it, and
the other one without it as a control; with `--cost-rounds 0` it does not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import cycle, permutations
from pathlib import Path
from typing import Any

import httpx
from report import markdown
from servers import Running, cpu_s, genserve_server

ANSWER_TOKENS = 32
STREAMS, TURNS = 8, 3  # of the conversations
_CLIENT = httpx.Client(timeout=600)  # a client for each request would take 20 ms of its first token
_WRITING_S = 0.3  # in which the blocks of the last answers are written


def main() -> None:
    options = _options()
    prompts = [_prompt(options.tokens, seed=seed) for seed in range(options.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--prefix-cache-dir={folder}"]
        runs = []
        for num_times in (2, 1):
            with genserve_server(options.model_repository, flags=flags) as server:
                _ask(server, _prompt(64, seed=-1))  # the first request of a process is slower
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
    """Return a table of what a folder costs a server with conversations: time, and CPU time."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {
            name: stack.enter_context(genserve_server(options.model_repository, flags=flags))
            for name, flags in (("off", []), ("off again", []), ("on", [f"--prefix-cache-dir={folder}"]))
        }
        orders = cycle(permutations(servers))
        threads = stack.enter_context(ThreadPoolExecutor(STREAMS))
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
        for number in range(options.cost_rounds + 1):
            prompts = [_prompt(options.cost_tokens, seed=-2)] * STREAMS  # the system prompt
            for turn in range(TURNS):
                first_seed = 1000 + (number * TURNS + turn) * STREAMS
                prompts = [
                    prompt + _prompt(options.cost_tokens // 2, seed=seed)
                    for seed, prompt in enumerate(prompts, first_seed)
                ]
                answers = {}
                for name in next(orders):
                    before_s, started_s = cpu_s(servers[name].pid), time.perf_counter()
                    got = [*threads.map(partial(_ask, servers[name]), prompts)]
                    taken_s = time.perf_counter() - started_s
                    time.sleep(_WRITING_S)
                    figures[name].append((taken_s, cpu_s(servers[name].pid) - before_s))
                    answers[name] = [answer for _, answer in got]
                if any(answer != answers["off"] for answer in answers.values()):
                    raise SystemExit("an answer of the server with a folder is another one")
                prompts = [prompt + answer[0] for prompt, answer in zip(prompts, answers["on"], strict=True)]
    off, *others = ((name, turns[TURNS:]) for name, turns in figures.items())  # the first round warms up
    rows = []
    for name, turns in others:
        for index, kind in enumerate(("time", "CPU time")):
            pairs = [(a[index], b[index]) for a, b in zip(off[1], turns, strict=True)]
            ratios = sorted(b / a for a, b in pairs)
            middle = [f"{statistics.median(column):.2f}" for column in zip(*pairs, strict=True)]
            quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            whole = sum(b for _, b in pairs) / sum(a for a, _ in pairs)
            more = [f"{(ratio - 1) * 100:+.1f} %" for ratio in (whole, *quarters)]
            rows.append([name, kind, *middle, *more])
    titles = ("server", "of a turn", "off, s", "it, s", "all turns", "lower quartile", "median of ratios")
    return markdown((*titles, "upper quartile"), rows)


def _prompt(num_tokens: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 300) for _ in range(num_tokens)]


def _ask(server: Running, prompt: Sequence[int]) -> tuple[float, Any]:
    """Return the seconds to the first token, and the answer's tokens with their log-probabilities."""
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": 1, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True}
    first_s = 0.0
    token_ids, logprobs = [], []  # a step may yield several tokens, or one
    started_s = time.perf_counter()
    url = f"http://127.0.0.1:{server.http}/v1/completions"
    with _CLIENT.stream("POST", url, json=body) as got:
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
    parser.add_argument("--cost-tokens", type=int, default=256)
    parser.add_argument("--cost-rounds", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
