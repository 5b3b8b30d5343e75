"""Routing: what prefix-aware routing of a chat trace saves, compared with round robin and power of two.

    python benchmarks/routing.py --plot routing.png

plays the same trace to several replicas behind each policy: sessions of several turns, each of which begins
with one of a few system prompts and sends its whole history again. A replica is a real engine with scheduler
and KV cache, but its logits stage only waits as long as a measured one computes (`waiting_logits.py`). So the
measured step limits the replicas, and not the cores of this machine.

Most load balancers route by round robin, and Ray Serve by power of two choices: of two random replicas, the
one with fewer requests gets the request. Our policy is `genserve/deploy/routing/prefix_router.py`, with
statistics as old as in a deployment (`--statistics-s`).

Prints a table of medians over the rounds in Markdown. Cached tokens are the share of all prompt tokens that a
replica did not compute. The ratio of a round compares our policy with the better of the two other policies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from engine_overhead import NoText, decode
from report import markdown, median
from waiting_logits import SMOLLM2, WaitingLogits

from genserve.cli.plots import check_plot, new_figure
from genserve.completion import Delta
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.deploy.routing.request_ranking import RequestRanking
from genserve.engine.admission_control import QueueLimits
from genserve.engine.delta_streams import EventLoopSink
from genserve.engine.engine import Engine
from genserve.engine.engine_thread import EngineThread
from genserve.engine.generation_request import GenerationRequest
from genserve.engine.token_sequence import TokenSequence
from genserve.generation_metrics import Metrics
from genserve.sampling.sampling_params import SamplingParams

BLOCK_SIZE = 16
MAX_LENGTH = 4096
VOCAB_SIZE = 320
HEADINGS = (
    *("policy", "cached tokens", "first token p50, ms", "p95, ms", "answer p50, s", "tokens/s"),
    "busiest replica",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session."""

    user_tokens: tuple[int, ...]
    answer_tokens: int
    pause_s: float          # the pause before the turn, while the user reads and writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A chat: each turn sends the system prompt and all earlier turns again."""

    start_s: float
    system_tokens: tuple[int, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The measurements of one turn."""

    replica: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    first_s: float          # the time to the first token
    seconds: float


class Replica:
    """An engine whose logits stage only waits."""

    def __init__(self, *, num_blocks: int, sink: EventLoopSink) -> None:
        logits = WaitingLogits(SMOLLM2, num_blocks=num_blocks, max_length=MAX_LENGTH, vocab_size=VOCAB_SIZE)
        self._engine = Engine(logits, decode=decode)
        self.thread = EngineThread(
            self._engine,
            name="replica",
            max_num_seqs=logits.max_num_seqs,
            limits=QueueLimits(max_requests=10_000),
            metrics=Metrics().for_model("replica"),
            sequences_of=self._sequences_of,
        )
        self.num_requests = 0
        self._num_blocks = num_blocks
        self._waiting_tokens = 0
        self._sink = sink

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            running=self._engine.num_running,
            waiting=self._engine.num_waiting,
            waiting_tokens=self._waiting_tokens,
            kv_usage=self._engine.cache_usage,
            block_size=BLOCK_SIZE,
            num_blocks=self._num_blocks,
        )

    def _sequences_of(self, request: GenerationRequest) -> list[TokenSequence]:
        sequence = TokenSequence(
            request.prompt_token_ids,
            params=request.params,
            seed=0,
            eos_token_ids=frozenset(),
            text=NoText(),
            max_length=MAX_LENGTH,
            vocab_size=VOCAB_SIZE,
        )
        sequence.request, sequence.choice = request, 0
        return [sequence]

    async def answer(self, token_ids: Sequence[int], *, num_tokens: int) -> tuple[list[Delta], float]:
        """Generate an answer, and return its deltas with the time of its first token."""
        request = generation(token_ids, max_tokens=num_tokens, ignore_eos=True)
        self.num_requests += 1
        self._waiting_tokens += len(token_ids)
        first_s, read = 0.0, list[Delta]()
        async with self._sink.open(self.thread, request) as stream:
            async for deltas in stream:
                read += deltas
                if not first_s:
                    first_s = time.perf_counter()
                    self._waiting_tokens -= len(token_ids)
        self.num_requests -= 1
        return read, first_s


def generation(token_ids: Sequence[int], **params: Any) -> GenerationRequest:
    """Return a request for one answer to a prompt."""
    prompt = tuple(token_ids)
    return GenerationRequest(
        prompt=prompt, prompt_token_ids=prompt, params=SamplingParams(**params), seeds=(0,)
    )


class Policy(Protocol):
    """Chooses the replica of a request."""

    def choose(self, request: int, token_ids: Sequence[int]) -> int:
        """Return the number of a replica."""

    def ended(self, request: int, replica: int) -> None:
        """Record the end of a request."""


class RoundRobin:
    """Chooses each replica in turn."""

    def __init__(self, replicas: Sequence[Replica], options: argparse.Namespace) -> None:
        self._replicas = replicas
        self._turns = count()

    def choose(self, request: int, token_ids: Sequence[int]) -> int:
        return next(self._turns) % len(self._replicas)

    def ended(self, request: int, replica: int) -> None:
        pass


class PowerOfTwo:
    """Chooses the one of two random replicas that has fewer requests."""

    def __init__(self, replicas: Sequence[Replica], options: argparse.Namespace) -> None:
        self._replicas = replicas
        self._random = random.Random(options.seed)

    def choose(self, request: int, token_ids: Sequence[int]) -> int:
        pair = self._random.sample(range(len(self._replicas)), min(2, len(self._replicas)))
        return min(pair, key=lambda number: self._replicas[number].num_requests)

    def ended(self, request: int, replica: int) -> None:
        pass


class PrefixAware:
    """Chooses as `genserve deploy ray` does, with statistics that are up to `statistics_s` old."""

    def __init__(self, replicas: Sequence[Replica], options: argparse.Namespace) -> None:
        self._replicas = replicas
        self._ranking: RequestRanking[int] = RequestRanking()
        self._period_s = options.statistics_s
        self._observed_s = 0.0
        self.choice_s: list[float] = []

    def choose(self, request: int, token_ids: Sequence[int]) -> int:
        started_s = time.perf_counter()
        if started_s > self._observed_s + self._period_s:
            self._observed_s = started_s
            for number, replica in enumerate(self._replicas):
                self._ranking.observe(number, replica.load())
        asked = generation(token_ids)
        chosen = self._ranking.rank(asked, range(len(self._replicas)))[0]
        self._ranking.sent(request, asked, chosen)
        self.choice_s.append(time.perf_counter() - started_s)
        return chosen

    def ended(self, request: int, replica: int) -> None:
        self._ranking.ended(request, replica)


POLICIES: Mapping[str, Callable[[Sequence[Replica], argparse.Namespace], Policy]] = {
    "round robin": RoundRobin,
    "power of two choices": PowerOfTwo,
    "prefix-aware": PrefixAware,
}


def make_trace(options: argparse.Namespace, *, seed: int) -> list[Session]:
    """Draw sessions that start at random times; some system prompts are more common than others."""
    rng = random.Random(seed)
    systems = [_tokens(rng, options.system_tokens) for _ in range(options.system_prompts)]
    popularity = [1 / rank for rank in range(1, len(systems) + 1)]      # Zipf's law
    starts_s = accumulate(rng.expovariate(options.sessions_per_s) for _ in range(options.sessions))
    return [
        Session(
            start_s=start_s,
            system_tokens=rng.choices(systems, popularity)[0],
            turns=_turns(rng, options, count=rng.randint(2, 2 * options.turns - 2)),
        )
        for start_s in starts_s
    ]


def _turns(rng: random.Random, options: argparse.Namespace, *, count: int) -> tuple[Turn, ...]:
    return tuple(_turn(rng, options, number) for number in range(count))


def _turn(rng: random.Random, options: argparse.Namespace, number: int) -> Turn:
    return Turn(
        user_tokens=_tokens(rng, rng.randint(options.user_tokens // 2, options.user_tokens * 3 // 2)),
        answer_tokens=rng.randint(options.answer_tokens // 2, options.answer_tokens * 3 // 2),
        pause_s=rng.expovariate(1 / options.pause_s) if number else 0.0,
    )


def _tokens(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(VOCAB_SIZE), k=num_tokens))


async def play(trace: Sequence[Session], name: str, options: argparse.Namespace) -> dict[str, float]:
    """Play the trace to new replicas behind a policy, and return its figures."""
    sink = EventLoopSink(asyncio.get_running_loop())
    num_blocks = options.cache_tokens // BLOCK_SIZE
    replicas = [Replica(num_blocks=num_blocks, sink=sink) for _ in range(options.replicas)]
    policy = POLICIES[name](replicas, options)
    requests, answered = count(), list[Answered]()
    started_s = time.perf_counter()

    async def chat(session: Session) -> None:
        await asyncio.sleep(started_s + session.start_s - time.perf_counter())
        history = list(session.system_tokens)
        for turn in session.turns:
            await asyncio.sleep(turn.pause_s)
            history += turn.user_tokens
            request, sent_s = next(requests), time.perf_counter()
            chosen = policy.choose(request, history)
            deltas, first_s = await replicas[chosen].answer(history, num_tokens=turn.answer_tokens)
            policy.ended(request, chosen)
            answered.append(
                Answered(
                    replica=chosen,
                    prompt_tokens=len(history),
                    cached_tokens=deltas[0].cached_tokens,
                    new_tokens=sum(len(delta.token_ids) for delta in deltas),
                    first_s=first_s - sent_s,
                    seconds=time.perf_counter() - sent_s,
                )
            )
            history += [token_id for delta in deltas for token_id in delta.token_ids]

    try:
        await asyncio.gather(*map(chat, trace))
    finally:
        for replica in replicas:
            replica.thread.close()
    figures = summarise(answered, elapsed_s=time.perf_counter() - started_s, num_replicas=options.replicas)
    if isinstance(policy, PrefixAware):
        figures["choice_us"] = statistics.median(policy.choice_s) * 1e6
    return figures


def summarise(answered: Sequence[Answered], *, elapsed_s: float, num_replicas: int) -> dict[str, float]:
    """Return the figures of a round."""
    first_ms = np.array([one.first_s for one in answered]) * 1e3
    prompt_tokens = sum(one.prompt_tokens for one in answered)
    computed = [0] * num_replicas
    for one in answered:
        computed[one.replica] += one.prompt_tokens - one.cached_tokens + one.new_tokens
    return {
        "requests": float(len(answered)),
        "prompt_tokens": float(prompt_tokens),
        "cached_tokens": float(sum(one.cached_tokens for one in answered)),
        "cached_share": sum(one.cached_tokens for one in answered) / prompt_tokens,
        "first_p50_ms": float(np.percentile(first_ms, 50)),
        "first_p95_ms": float(np.percentile(first_ms, 95)),
        "answer_p50_s": statistics.median(one.seconds for one in answered),
        "tokens_per_s": sum(one.new_tokens for one in answered) / elapsed_s,
        "busiest_share": max(computed) / sum(computed),
    }


def compare(rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Return our figures divided by the figures of the better other policy: medians of the rounds."""
    ours = rounds["prefix-aware"]
    others = [rounds[name] for name in POLICIES if name != "prefix-aware"]
    cached = [
        mine["cached_tokens"] / max(other["cached_tokens"] for other in both)
        for mine, *both in zip(ours, *others, strict=True)
    ]
    first = [
        mine["first_p50_ms"] / min(other["first_p50_ms"] for other in both)
        for mine, *both in zip(ours, *others, strict=True)
    ]
    return {"cached_tokens": statistics.median(cached), "first_p50": statistics.median(first)}


def describe(trace: Sequence[Session], options: argparse.Namespace) -> dict[str, float]:
    """Return how many tokens the caches would need for all sessions that are open at one time."""
    distinct = sum(sum(len(t.user_tokens) + t.answer_tokens for t in session.turns) for session in trace)
    system = len({session.system_tokens for session in trace}) * options.system_tokens
    mean_s = statistics.fmean(sum(turn.pause_s for turn in session.turns) for session in trace)
    open_sessions = options.sessions_per_s * mean_s
    return {
        "sessions": float(len(trace)),
        "turns": float(sum(len(session.turns) for session in trace)),
        "open_sessions": open_sessions,
        "open_tokens": system + open_sessions * distinct / len(trace),
    }


def draw(rounds: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Draw the shares of cached tokens and the times to the first token."""
    figure = new_figure()
    cached, first = figure.subplots(1, 2)
    names = list(rounds)
    bars = cached.bar(names, [100 * median(rounds[name], "cached_share") for name in names], width=0.6)
    cached.bar_label(bars, fmt="%.0f %%")
    cached.set_ylabel("cached tokens, % of all prompt tokens")
    for offset, figure_name in ((-0.2, "first_p50_ms"), (0.2, "first_p95_ms")):
        places = [place + offset for place in range(len(names))]
        label = "median" if "p50" in figure_name else "95th percentile"
        heights = [median(rounds[name], figure_name) for name in names]
        bars = first.bar(places, heights, width=0.4, label=label)
        first.bar_label(bars, fmt="%.0f")
    first.set_xticks(range(len(names)), labels=names)
    first.set_ylabel("first token, ms")
    first.legend()
    figure.savefig(path)


def main() -> None:
    options = _options()
    if options.plot:
        check_plot(options.plot)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in POLICIES}
    for number in range(options.rounds):
        trace = make_trace(options, seed=options.seed + number)
        described = describe(trace, options)
        for name in POLICIES:
            rounds[name].append(asyncio.run(play(trace, name, options)))
    ratios = compare(rounds)
    print(
        f"{options.replicas} replicas with room for {options.cache_tokens} tokens each; "
        f"{described['sessions']:.0f} sessions, {described['turns']:.0f} turns\n"
        f"about {described['open_sessions']:.0f} sessions at a time with {described['open_tokens']:.0f} "
        f"different tokens: {described['open_tokens'] / options.cache_tokens:.1f} times the cache of a "
        f"replica, {described['open_tokens'] / options.cache_tokens / options.replicas:.0%} of all caches\n"
    )
    print(markdown(HEADINGS, [_row(name, measured) for name, measured in rounds.items()]))
    print(
        f"\ncached tokens: x{ratios['cached_tokens']:.2f}, first token p50: x{ratios['first_p50']:.2f} of "
        f"the better one of the others; a choice takes {median(rounds['prefix-aware'], 'choice_us'):.0f} "
        "microseconds, block keys included"
    )
    if options.plot:
        draw(rounds, options.plot)
    if options.json:
        report = {"trace": described, "rounds": rounds, "ratios": ratios}
        options.json.write_text(json.dumps(report, indent=2))


def _row(name: str, rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        name,
        f"{median(rounds, 'cached_share'):.0%}",
        f"{median(rounds, 'first_p50_ms'):.0f}",
        f"{median(rounds, 'first_p95_ms'):.0f}",
        f"{median(rounds, 'answer_p50_s'):.2f}",
        f"{median(rounds, 'tokens_per_s'):.0f}",
        f"{median(rounds, 'busiest_share'):.0%}",
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--cache-tokens", type=int, default=16_384, help="room in the KV cache of a replica")
    parser.add_argument("--sessions", type=int, default=180)
    parser.add_argument("--sessions-per-s", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=6, help="of a session, mean; at least 2")
    parser.add_argument("--system-prompts", type=int, default=32)
    parser.add_argument("--system-tokens", type=int, default=256)
    parser.add_argument("--user-tokens", type=int, default=60, help="of a message, mean")
    parser.add_argument("--answer-tokens", type=int, default=100, help="mean")
    parser.add_argument("--pause-s", type=float, default=5.0, help="between two turns, mean")
    parser.add_argument("--statistics-s", type=float, default=1.0, help="age of the replicas' statistics")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
