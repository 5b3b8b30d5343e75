"""Fair share: two API keys on one server, of which one floods it.

    python benchmarks/fair_share.py --model-repository model_repository

Prints the first token of a key with a request a second, alone and beside a key with 64 requests, in turns;
then the tokens of two keys that both flood, by their weights.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from servers import Running, genserve_server

KEYS = """
[flood]
key = "flood"
[other]
key = "other"
weight = {weight}
"""
WORDS = Path(__file__).read_text().split()
_seeds = count()


def completion(server: Running, key: str, *, num_words: int, max_tokens: int) -> float:
    """Send a prompt that nobody has sent, and return the seconds to its first token."""
    drawn = random.Random(next(_seeds))
    prompt = " ".join(drawn.choices(WORDS, k=num_words))
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    request = _request(server, key, "/v1/completions", body)
    began_s = time.monotonic()
    with urllib.request.urlopen(request) as response:
        response.readline()
        first_s = time.monotonic() - began_s
        response.read()
    return first_s


def usage(server: Running, key: str) -> int:
    """Return the tokens that a key has used, those of running requests included."""
    with urllib.request.urlopen(_request(server, key, "/v1/usage")) as response:
        used = json.load(response)
    return int(used["prompt_tokens"]) - int(used["cached_tokens"]) + int(used["completion_tokens"])


def _request(server: Running, key: str, path: str, body: Any = None) -> urllib.request.Request:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(f"http://127.0.0.1:{server.http}{path}", data, headers)


@contextmanager
def flood(server: Running, key: str, *, num_requests: int) -> Iterator[None]:
    """Keep requests of a key waiting or running until the block ends."""
    ending = threading.Event()

    def repeat() -> None:
        while not ending.is_set():
            completion(server, key, num_words=60, max_tokens=100)

    with ThreadPoolExecutor(num_requests) as threads:
        running = [threads.submit(repeat) for _ in range(num_requests)]
        try:
            time.sleep(10)
            yield
        finally:
            ending.set()
    for each in running:
        each.result()


def first_tokens(server: Running, *, rounds: int, num_words: int) -> list[float]:
    """Send a request a second, and return the seconds to the first token of each."""
    seconds = []
    for _ in range(rounds):
        next_s = time.monotonic() + 1
        seconds.append(completion(server, "other", num_words=num_words, max_tokens=8))
        time.sleep(max(0.0, next_s - time.monotonic()))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20, help="of first tokens; 0 leaves them out")
    parser.add_argument("--words", type=int, default=300, help="in prompts of the key that does not flood")
    parser.add_argument("--weight", type=float, default=3.0, help="of one of two keys that flood")
    parser.add_argument("--seconds", type=float, default=60.0, help="that both flood; 0: they do not")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.touch(mode=0o600)
        keys.write_text(KEYS.format(weight=options.weight))
        flags = (f"--api-key-file={keys}", "--max-queue-wait-s=600")
        with genserve_server(options.model_repository, flags=flags) as server:
            if options.rounds:
                compare_first_tokens(server, rounds=options.rounds, num_words=options.words)
            if options.seconds:
                compare_tokens(server, seconds=options.seconds, weight=options.weight)


def compare_first_tokens(server: Running, *, rounds: int, num_words: int) -> None:
    """Print the first token of the second key, alone and beside 64 requests of the first one."""
    completion(server, "other", num_words=num_words, max_tokens=8)
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(2):
        alone += first_tokens(server, rounds=rounds // 2, num_words=num_words)
        with flood(server, "flood", num_requests=64):
            beside += first_tokens(server, rounds=rounds // 2, num_words=num_words)
    ratio = median(beside) / median(alone)
    print(f"first token alone {median(alone):.3f} s, beside 64 {median(beside):.3f} s: {ratio:.2f}")


def compare_tokens(server: Running, *, seconds: float, weight: float) -> None:
    """Print the tokens of two keys that both flood."""
    with flood(server, "flood", num_requests=64), flood(server, "other", num_requests=64):
        time.sleep(seconds / 4)     # until what the second key may keep is used up
        before = [usage(server, key) for key in ("flood", "other")]
        time.sleep(seconds)
        after = [usage(server, key) for key in ("flood", "other")]
    tokens = [end - begin for begin, end in zip(before, after, strict=True)]
    print(f"tokens by weight 1 : {weight:g} are {tokens[0]} : {tokens[1]}, 1 : {tokens[1] / tokens[0]:.2f}")


if __name__ == "__main__":
    main()
