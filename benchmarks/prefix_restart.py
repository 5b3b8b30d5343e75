"""Prefix restart: the first token of a long prompt that is cached, and what the prefix cache on disk costs.

    python benchmarks/prefix_restart.py --model-repository model_repository

starts `genserve serve --prefix-cache-dir` with an empty folder, sends `--rounds` prompts of `--tokens` tokens
twice, stops the server, starts another one on the folder and sends it the prompts again. Prints the medians
of the time to first token: computed, from memory and from disk. Fails unless all answers to a prompt have the
same tokens and log-probabilities.

Then measures in this process what the folder costs: an engine has conversations of three turns, 8 at once,
with it, without it, and without it again as a control, one after the other at each turn. They have a system
prompt of `--cost-tokens` tokens, messages of half as many, and answers of 32 tokens. `--cost-rounds` such
conversations follow each other. Servers would not show the cost: two equal ones differ by up to a tenth,
since each has its own luck with memory. Prints how much more time for all answers of a turn, and CPU time
until their blocks are written, it takes than without the folder: the median of turns, with a bootstrap
interval. Leaves out turns in which other processes ran. With `--cost-rounds 0` it does not measure this.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import cycle, permutations, product
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import httpx
from report import markdown
from servers import Running, genserve_server

from genserve.engine.disk_cache import PrefixCacheFolder
from genserve.engine.generation_request import GenerationOutput, GenerationRequest
from genserve.repository.options import RepositoryOptions
from genserve.repository.repository import Repository
from genserve.sampling.sampling_params import SamplingParams
from genserve.textmodel.text_model import TextModel

ANSWER_TOKENS = 32
STREAMS, TURNS = 8, 3  # of the conversations
_CLIENT = httpx.Client(timeout=600)  # a client for each request would take 20 ms of its first token
KINDS = ("off", "off again", "on")
MAX_OTHERS = 0.1  # cores that other processes use in a turn that counts


class Taken(NamedTuple):
    """What a turn takes."""

    seconds: float
    cpu_s: float
    others_s: float  # CPU time of other processes meanwhile


Turn: TypeAlias = Mapping[str, Taken]


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
        print(_cost(_turns(options)))


def _turns(options: argparse.Namespace) -> list[Turn]:
    """Return what the same turns of conversations take with a folder and without it."""
    with tempfile.TemporaryDirectory() as folder:
        disk = PrefixCacheFolder(path=Path(folder), max_bytes=8 << 30)
        with_folder = RepositoryOptions(prefix_cache_folder=disk)
        repository = Repository([options.model_repository], options=with_folder)
        repository.start([options.model])
        try:
            conversations = Conversations(repository.text_model(options.model))
            orders = cycle(permutations(KINDS))
            turns = []
            for number in range(options.cost_rounds + 1):
                prompts = [_prompt(options.cost_tokens, seed=-2)] * STREAMS  # the system prompt
                for turn in range(TURNS):
                    first_seed = 1000 + (number * TURNS + turn) * STREAMS
                    prompts = [
                        prompt + _prompt(options.cost_tokens // 2, seed=seed)
                        for seed, prompt in enumerate(prompts, first_seed)
                    ]
                    answers, taken = {}, {}
                    for kind in next(orders):
                        answers[kind], taken[kind] = conversations.answer(prompts, kind=kind)
                    if any(answer != answers["off"] for answer in answers.values()):
                        raise SystemExit("an answer with a folder is another one")
                    turns.append(taken)
                    prompts = [prompt + got for prompt, got in zip(prompts, answers["on"], strict=True)]
            return turns[TURNS:]  # the first round warms up
        finally:
            repository.close()


class Conversations:
    """Conversations with one engine, which uses its prefix cache on disk or does not."""

    def __init__(self, model: TextModel) -> None:
        assert model.disk_cache is not None
        self._model = model
        self._disk_cache = model.disk_cache

    def answer(self, prompts: Sequence[list[int]], *, kind: str) -> tuple[list[list[int]], Taken]:
        """Return the answers to prompts at once, and what they take."""
        engine = self._model.engine._engine
        engine.disk_cache = self._disk_cache if kind == "on" else None
        engine._kv.filled = [] if kind == "on" else None
        # Each kind computes its own blocks.
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True, cache_salt=kind)
        requests = [self._model.prepare(prompt, params) for prompt in prompts]
        answers: dict[GenerationRequest, list[int]] = {request: [] for request in requests}
        others_s, cpu_s, started_s = _others_s(), time.process_time(), time.perf_counter()
        outputs = Outputs()
        self._model.engine.submit(*requests, sink=outputs)
        num_open = len(requests)
        while num_open:
            output = outputs.arrived.get()
            if isinstance(output.content, Exception):
                raise output.content
            answers[output.request] += output.content.token_ids
            num_open -= output.content.finish_reason is not None
        taken_s = time.perf_counter() - started_s
        while self._disk_cache._unwritten_bytes:
            time.sleep(0.002)
        taken = Taken(taken_s, time.process_time() - cpu_s, _others_s() - others_s)
        return [*answers.values()], taken


class Outputs:
    """What the engine sends; an `OutputSink`."""

    def __init__(self) -> None:
        self.arrived: SimpleQueue[GenerationOutput] = SimpleQueue()

    def deliver(self, outputs: Sequence[GenerationOutput]) -> None:
        for output in outputs:
            self.arrived.put(output)


def _others_s() -> float:
    """Return the CPU time of all other processes so far; Linux only."""
    user, nice, system, _, _, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    ticks = sum(map(int, (user, nice, system, irq, softirq, steal)))
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def _cost(turns: Sequence[Turn]) -> str:
    quiet = [turn for turn in turns if all(t.others_s < MAX_OTHERS * t.seconds for t in turn.values())]
    print(f"{len(quiet)} of {len(turns)} turns without other processes:\n")
    rng = random.Random(0)
    rows = []
    for kind, (index, figure) in product(("on", "off again"), enumerate(("time", "CPU time"))):
        more = [_more(turn, kind, index) for turn in quiet or turns]
        drawn = (statistics.median(rng.choices(more, k=len(more))) for _ in range(4000))
        _, *ends, _ = statistics.quantiles(drawn, n=40)
        figures = (statistics.median(more), ends[0], ends[-1])
        rows.append([kind, figure, *(f"{each * 100:+.1f} %" for each in figures)])
    return markdown(("folder", "of a turn", "more than off", "95 % interval: from", "to"), rows)


def _more(turn: Turn, kind: str, index: int) -> float:
    """Return how much more a turn takes than without a folder, or than the other one without."""
    off = [turn[other][index] for other in ("off", "off again") if other != kind]
    return turn[kind][index] / statistics.mean(off) - 1


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
    parser.add_argument("--cost-rounds", type=int, default=16)
    parser.add_argument("--model", default="smollm2")
    return parser.parse_args()


if __name__ == "__main__":
    main()
