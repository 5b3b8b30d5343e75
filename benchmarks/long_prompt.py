"""Long prompt: the effects of a long prompt and running streams on each other's latencies.

    python benchmarks/long_prompt.py --model-repository model_repository

starts `genserve serve`, and in each round requests the first token of a prompt of 3,000 words, first alone
and then during eight streams. Prints the time to first token, and the inter-token latencies of the streams
before and during the prompt, in milliseconds, medians of the rounds. `--prompts 8 --words 1500 --streams 4`
sends eight prompts at once; their time is that until all have a token.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from report import markdown
from servers import genserve_server

from genserve import AsyncClient
from genserve.bench.datasets import random_prompts

SETTLED_S = 2.0     # the time after which the prompts of the streams are computed
UNDISTURBED_S = 2.0
HEADINGS = (
    "first token alone", "during streams", "ratio", "gap p99 before", "p99 during", "ratio", "largest during"
)


def main() -> None:
    options = _options()
    with genserve_server(options.model_repository) as server:
        rounds = asyncio.run(_rounds(f"http://127.0.0.1:{server.http}", options))
    columns = zip(*rounds[1:], strict=True)     # the first round warms up
    print(markdown(HEADINGS, [[f"{statistics.median(column):.4g}" for column in columns]]))


async def _rounds(url: str, options: argparse.Namespace) -> list[tuple[float, ...]]:
    async with AsyncClient(url) as client:
        return [await _round(client, number, options) for number in range(options.rounds + 1)]


async def _round(client: AsyncClient, number: int, options: argparse.Namespace) -> tuple[float, ...]:
    prompts = random_prompts(2 * options.prompts, words=options.words, shared_words=0, seed=2 * number)
    long, others = prompts[: options.prompts], prompts[options.prompts :]
    short = random_prompts(options.streams, words=30, shared_words=0, seed=2 * number + 1)
    alone_s = await _first_tokens_s(client, long)
    arrivals: list[list[float]] = [[] for _ in short]
    pairs = zip(short, arrivals, strict=True)
    streams = [asyncio.create_task(_stream(client, prompt, times)) for prompt, times in pairs]
    await asyncio.sleep(SETTLED_S + UNDISTURBED_S)
    began_s = time.perf_counter()
    during_s = await _first_tokens_s(client, others)
    ended_s = time.perf_counter()
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    before = _gaps(arrivals, since_s=began_s - UNDISTURBED_S, until_s=began_s)
    during = _gaps(arrivals, since_s=began_s, until_s=ended_s)
    p99, slower = (statistics.quantiles(gaps, n=100)[-1] * 1e3 for gaps in (before, during))
    return alone_s * 1e3, during_s * 1e3, during_s / alone_s, p99, slower, slower / p99, max(during) * 1e3


async def _first_tokens_s(client: AsyncClient, prompts: Sequence[str]) -> float:
    started_s = time.perf_counter()
    await asyncio.gather(*(client.generate(prompt, max_tokens=1, ignore_eos=True) for prompt in prompts))
    return time.perf_counter() - started_s


async def _stream(client: AsyncClient, prompt: str, times: list[float]) -> None:
    async with client.stream(prompt, max_tokens=2000, ignore_eos=True) as stream:
        async for _ in stream:
            times.append(time.perf_counter())


def _gaps(arrivals: list[list[float]], *, since_s: float, until_s: float) -> list[float]:
    return [b - a for times in arrivals for a, b in pairwise(times) if since_s <= a and b <= until_s]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--words", type=int, default=3000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
