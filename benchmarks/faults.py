"""Faults: what a server keeps up while clients leave, processes die, models are reloaded and inputs are bad.

    python benchmarks/faults.py --model-repository model_repository --model smollm2

starts `genserve serve` with the text model and small models, and prints one page: what was done to the
server, what it promises, and what it did. Each phase can also be run alone (`--only`):

    mix          --minutes of all faults at once: nothing is lost, memory stays flat
    disconnects  one client after another leaves; how soon its slot is free
    overload     --load times as many requests as the server can answer
    connections  streams and idle connections that are open at once
    control      a model that leaks, which the judge of the mix must notice

Exits with 1 if a promise does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import uvloop
from fault_mix import FaultMix
from growth import Sample, is_leak, memory_trend, sample, watch
from onnx import TensorProto, helper
from raw_client import Answer, Connection, Leave, RawClient, post_bytes
from report import markdown
from scraped_metrics import ScrapedMetrics
from servers import Running, cpu_s, genserve_server
from text_faces import FACES, request_of

from genserve.machine import num_cores

HERE = Path(__file__).parent
LAG_MS = 50.0               # p99 of the event loop's lag, and of the time of a rejection
GOODPUT = 0.9               # share of the capacity
RELEASE_S = 1.0
LEAK_MIB_PER_MINUTE = 0.5
# So small that the cache is full, and its memory in use, within the first minutes of the mix.
KV_CACHE = '\nparameters [ { key: "kv_cache_bytes" value: { string_value: "256MiB" } } ]\n'
LATE_S = 1                  # a rejection that takes longer was in the queue first
STREAM_TOKENS = 16          # tokens of each of many streams, all of which end before idle connections do
SETTLE_S = 10               # the time after the mix until nothing runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the page."""

    name: str
    value: str
    goal: str = ""
    holds: bool | None = None       # whether the promise is kept; None: the figure is no promise
    details: Sequence[str] = ()     # for stderr and --json: what broke the promise


def main() -> None:
    options = _options()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    figures: list[Figure] = []
    for name in options.only or PHASES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        started_s = time.monotonic()
        with _repository(options) as repository, _server(name, repository, options) as server:
            figures += uvloop.run(PHASES[name](server, repository, options))
        print(f"{name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
    for detail in (detail for one in figures for detail in one.details):
        print(f"  {detail}", file=sys.stderr)
    verdicts = {None: "", True: "yes", False: "NO"}
    rows = [(one.name, one.value, one.goal, verdicts[one.holds]) for one in figures]
    print(markdown(("", "measured", "promised", "holds"), rows))
    print(f"\n{options.model} on {num_cores()} cores, shared with the client.")
    if options.json:
        report = {"arguments": sys.argv[1:], "figures": [asdict(one) for one in figures]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(any(one.holds is False for one in figures))


@contextmanager
def _repository(options: argparse.Namespace) -> Iterator[Path]:
    """Make a temporary repository with the text model and the small models."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for source in sorted(options.model_repository.glob(f"{options.model}*")):
            shutil.copytree(source, root / source.name)
        logits = root / f"{options.model}_logits" / "config.pbtxt"
        logits.write_text(logits.read_text() + KV_CACHE)
        for name in ("echo", "isolated", "leaking"):
            shutil.copytree(HERE / "models" / name, root / name)
        _write_scaled(root / "scaled")
        yield root


def _write_scaled(folder: Path) -> None:
    """Write a model for ONNX Runtime: Y = 2 X."""
    kind = (TensorProto.FLOAT, ["rows", "columns"])
    two = helper.make_tensor("two", TensorProto.FLOAT, [], [2.0])
    graph = helper.make_graph(
        [helper.make_node("Mul", ["X", "two"], ["Y"])],
        "scaled",
        [helper.make_tensor_value_info("X", *kind)],
        [helper.make_tensor_value_info("Y", *kind)],
        [two],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 8\n')


@contextmanager
def _server(phase: str, repository: Path, options: argparse.Namespace) -> Iterator[Running]:
    flags = ["--model-control-mode=explicit", "--load-model=*", *options.serve]
    if phase == "connections":
        flags += [f"--max-queue={options.streams}", "--max-queue-tokens=0", "--max-queue-wait-s=0"]
    with genserve_server(repository, flags=flags) as server:
        yield server


async def _metrics(server: Running, options: argparse.Namespace) -> ScrapedMetrics:
    client = RawClient(server.metrics)
    text = (await client.get("/metrics")).body.decode()
    client.close()
    return ScrapedMetrics(text, model=options.model)


async def _settled(server: Running, options: argparse.Namespace) -> ScrapedMetrics:
    """Return the metrics as soon as nothing runs, or after SETTLE_S."""
    ends_s = time.monotonic() + SETTLE_S
    metrics = await _metrics(server, options)
    while (metrics.num_open or metrics.num_blocks) and time.monotonic() < ends_s:
        await asyncio.sleep(0.005)
        metrics = await _metrics(server, options)
    return metrics


def _at_most(name: str, value: float, limit: float, *, unit: str = "", digits: int = 0) -> Figure:
    goal = f"<= {limit:g}{unit}" if limit else "0"
    return Figure(name=name, value=f"{value:.{digits}f}{unit}", goal=goal, holds=bool(value <= limit))


def _lag(before: ScrapedMetrics, after: ScrapedMetrics) -> list[Figure]:
    name = "genserve_event_loop_lag_seconds"
    earlier = dict(before.buckets(name))
    counts = [(bound, count - earlier.get(bound, 0)) for bound, count in after.buckets(name)]
    if not counts or not counts[-1][1]:
        return []
    goal = 0.99 * counts[-1][1]
    bound = next(bound for bound, count in counts if count >= goal)
    return [_at_most("event-loop lag p99 (bound of its bucket)", bound * 1e3, LAG_MS, unit=" ms")]


async def mix(server: Running, repository: Path, options: argparse.Namespace) -> list[Figure]:
    """All faults at once."""
    load = FaultMix(
        server,
        model=options.model,
        repository=repository,
        max_words=options.max_words,
        seed=options.seed,
    )
    samples: list[Sample] = []
    before = await _metrics(server, options)
    watching = asyncio.create_task(watch(server.pid, samples))
    await load.run(seconds=options.minutes * 60)
    watching.cancel()
    after = await _settled(server, options)
    ledger, last = load.ledger, sample(server.pid)
    grows = is_leak(memory_trend(samples), limit_mib_per_minute=LEAK_MIB_PER_MINUTE)
    wrong = [f"{count} x {what}" for what, count in ledger.wrong.most_common(20)]
    ends = ", ".join(f"{ledger.ends[end]} {end}" for end in ("finished", "left", "failed", "rejected"))
    later = samples[len(samples) // 2 :]
    return [
        Figure(name=f"requests in {options.minutes:g} minutes", value=f"{ledger.num_requests}: {ends}"),
        *(Figure(name=name, value=str(count)) for name, count in sorted(ledger.faults.items())),
        _at_most("requests lost", ledger.ends["lost"], 0),
        _at_most("requests ended twice", ledger.ends["ended twice"], 0),
        replace(_at_most("unexpected answers", ledger.wrong.total(), 0), details=wrong),
        _at_most("requests that the server still holds", after.num_open, 0),
        _at_most("leaked blocks", after.num_blocks, 0),
        *_lag(before, after),
        _memory_figure("memory", samples, holds=not grows),
        Figure(name="descriptors, half-way and at the end", value=f"{later[0].fds}, {last.fds}"),
        Figure(name="threads, half-way and at the end", value=f"{later[0].threads}, {last.threads}"),
    ]


def _memory_figure(name: str, samples: Sequence[Sample], *, holds: bool, goal: str = "no growth") -> Figure:
    found = memory_trend(samples)
    value = (
        f"{found.per_minute:+.2f} MiB/min ({found.low:+.2f} to {found.high:+.2f}) "
        f"over {found.minutes:.0f} min, at {samples[-1].memory_mib:.0f} MiB"
    )
    return Figure(name=name, value=value, goal=goal, holds=holds)


async def control(server: Running, _repository: Path, options: argparse.Namespace) -> list[Figure]:
    """Call a model that leaks 4 KiB per request a few times per second."""
    client = RawClient(server.http)
    tensor = {"name": "X", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    samples: list[Sample] = []
    watching = asyncio.create_task(watch(server.pid, samples))
    ends_s = time.monotonic() + max(30, options.minutes * 60 / 10)
    while time.monotonic() < ends_s:
        await client.post("/v2/models/leaking/infer", {"inputs": [tensor]})
        await asyncio.sleep(0.1)
    watching.cancel()
    client.close()
    is_caught = is_leak(memory_trend(samples), limit_mib_per_minute=LEAK_MIB_PER_MINUTE)
    name = "control: memory with a leak of 4 KiB per request"
    return [_memory_figure(name, samples, holds=is_caught, goal="growth")]


async def disconnects(server: Running, _repository: Path, options: argparse.Namespace) -> list[Figure]:
    """Measure the time until the slot of a client that leaves is free, for one client after another."""
    client, draw = RawClient(server.http), random.Random(options.seed)
    times_s: list[float] = []
    before = await _settled(server, options)
    for number in range(options.disconnects):
        face = FACES[tuple(FACES)[number % len(FACES)]]
        stream = draw.random() < 0.5
        path, body = request_of(face, options.model, f"{number} bottles of beer", tokens=400, stream=stream)
        leave = Leave(after_s=draw.random() * 0.3, reset=draw.random() < 0.5)
        answer = await client.ask(post_bytes(path, body), leave=leave)
        await _settled(server, options)
        if answer.has_left:
            times_s.append(time.perf_counter() - answer.end_s)
    after = await _settled(server, options)
    client.close()
    times_ms = np.array(times_s or [0]) * 1e3
    p50, p99 = np.percentile(times_ms, (50, 99))
    aborted = 'finished_reason="abort"'
    was, now = (one.value("genserve_requests_total", labels=aborted) for one in (before, after))
    return [
        Figure(name="clients that left, one at a time", value=f"{len(times_s)}, {now - was:.0f} running"),
        Figure(name="until the slot was free, p50 and p99", value=f"{p50:.0f}, {p99:.0f} ms"),
        _at_most("until the slot was free, longest", times_ms.max(), RELEASE_S * 1e3, unit=" ms"),
    ]


class _Load:
    """Streamed chats of half to one and a half times `new_tokens`, and how they ended.

    If all answers had one length, and as many clients as slots sent requests, the answers would begin and end
    together, unlike answers to independent clients.
    """

    def __init__(self, client: RawClient, options: argparse.Namespace, *, new_tokens: int) -> None:
        self.answers: list[Answer] = []
        self._num_tokens: list[int] = []        # the tokens of each chat
        self._new_tokens = new_tokens
        self._client = client
        self._options = options
        self._number = 0

    def request(self) -> tuple[bytes, int]:
        """Return the next request, and the tokens of its answer."""
        self._number += 1
        draw = random.Random(self._number)
        words = draw.choices(("red", "blue", "old", "new", "tree", "sea"), k=30)
        tokens = draw.randint(self._new_tokens // 2, self._new_tokens * 3 // 2)
        path, body = request_of(
            FACES["chat"], self._options.model, " ".join(words), tokens=tokens, stream=True
        )
        return post_bytes(path, body), tokens

    async def ask(self, request: bytes, tokens: int) -> Answer:
        answer = await self._client.ask(request)
        self.answers.append(answer)
        self._num_tokens.append(tokens)
        return answer

    def num_tokens(self, begin_s: float = -math.inf, end_s: float = math.inf) -> int:
        """Return the tokens of all complete answers that ended between two times."""
        return sum(
            tokens
            for one, tokens in zip(self.answers, self._num_tokens, strict=True)
            if one.status == 200 and begin_s <= one.end_s < end_s
        )

    def tokens_per_s(self, begin_s: float, end_s: float) -> float:
        return self.num_tokens(begin_s, end_s) / (end_s - begin_s)


async def overload(server: Running, _repository: Path, options: argparse.Namespace) -> list[Figure]:
    """Measure the goodput of an open loop beyond the capacity, which a closed loop determines first."""
    client = RawClient(server.http)
    capacity = _Load(client, options, new_tokens=options.new_tokens)
    ends_s = time.perf_counter() + options.seconds

    async def repeat() -> None:
        while time.perf_counter() < ends_s:
            await capacity.ask(*capacity.request())

    used_s = [cpu_s(server.pid)]
    await asyncio.gather(*(repeat() for _ in range(options.slots)))
    used_s.append(cpu_s(server.pid))
    most = capacity.tokens_per_s(ends_s - 0.75 * options.seconds, ends_s)
    if not most:
        raise SystemExit(f"no answer ended in {options.seconds} s: the overload needs more --seconds")
    rate = options.load * most / options.new_tokens
    beyond = _Load(client, options, new_tokens=options.new_tokens)
    requests = [beyond.request() for _ in range(round(rate * options.seconds))]     # before the clock runs
    before = await _metrics(server, options)
    begin_s = time.perf_counter()
    tasks = []
    for number, request in enumerate(requests):
        await asyncio.sleep(begin_s + number / rate - time.perf_counter())
        tasks.append(asyncio.create_task(beyond.ask(*request)))
    await asyncio.sleep(begin_s + options.seconds - time.perf_counter())
    after = await _metrics(server, options)
    await asyncio.gather(*tasks)
    used_s.append(cpu_s(server.pid))
    client.close()
    goodput = beyond.tokens_per_s(begin_s + 0.25 * options.seconds, begin_s + options.seconds)
    costs = [load.num_tokens() / used for load, used in zip((capacity, beyond), np.diff(used_s), strict=True)]
    share = goodput / most
    return [
        Figure(name="capacity", value=f"{most:.0f} tokens/s"),
        Figure(
            name=f"goodput at {rate:.0f} requests/s",
            value=f"{goodput:.0f} tokens/s, {share:.0%}",
            goal=f">= {GOODPUT:.0%}",
            holds=bool(share >= GOODPUT),
        ),
        Figure(
            name="tokens per second of the server's CPU time",
            value=f"{costs[1]:.0f}, {costs[1] / costs[0]:.0%} of those at its capacity",
        ),
        *_rejection_figures(beyond),
        *_lag(before, after),
    ]


def _rejection_figures(load: _Load) -> list[Figure]:
    rejected = [one for one in load.answers if one.status == 429]
    late = [one for one in rejected if one.end_s - one.sent_s > LATE_S]
    answered = [one for one in load.answers if one.status == 200]
    others = len(load.answers) - len(rejected) - len(answered)
    p50, p99 = np.percentile([one.end_s - one.sent_s for one in rejected] or [0], (50, 99)) * 1e3
    first_p50, first_p99 = np.percentile([one.first_s - one.sent_s for one in answered], (50, 99))
    return [
        Figure(name="answered, rejected", value=f"{len(answered)}, {len(rejected)}"),
        Figure(name="of them rejected after they had waited", value=str(len(late))),
        _at_most("ended otherwise", others, 0),
        Figure(name="first token of the answered, p50 and p99", value=f"{first_p50:.1f}, {first_p99:.1f} s"),
        Figure(name="rejection p50", value=f"{p50:.0f} ms"),
        _at_most("rejection p99", p99, LAG_MS, unit=" ms"),
    ]


async def connections(server: Running, _repository: Path, options: argparse.Namespace) -> list[Figure]:
    """Open many streams and idle connections at once."""
    client = RawClient(server.http)
    health = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    before = sample(server.pid)
    idle: list[Connection] = []
    for _ in range(options.idle):
        connection = await client.connect()
        await connection.ask(health)
        idle.append(connection)
    held = sample(server.pid)
    load = _Load(client, options, new_tokens=STREAM_TOKENS)
    started_s = time.perf_counter()
    tasks = [asyncio.create_task(load.ask(*load.request())) for _ in range(options.streams)]
    most_open = 0
    while not all(task.done() for task in tasks):
        most_open = max(most_open, round((await _metrics(server, options)).num_open))
        await asyncio.sleep(0.25)
    elapsed_s = time.perf_counter() - started_s
    finished = sum(one.status == 200 and FACES["chat"].num_ends(one.body) == 1 for one in load.answers)
    alive = 0
    for connection in idle:
        alive += connection.is_open and (await connection.ask(health, timeout_s=5)).status == 200
        connection.close()
    client.close()
    return [
        Figure(
            name="idle connections held, still usable after", goal=str(options.idle),
            value=f"{len(idle)}, {alive} after {elapsed_s:.0f} s", holds=alive == options.idle,
        ),
        Figure(
            name="memory per idle connection",
            value=f"{(held.memory_mib - before.memory_mib) * 1024 / len(idle):.1f} KiB",
        ),
        Figure(
            name="streams at once, finished", goal=str(options.streams),
            value=f"{most_open}, {finished} in {elapsed_s:.0f} s", holds=finished == options.streams,
        ),
    ]  # fmt: skip


Phase = Callable[[Running, Path, argparse.Namespace], Coroutine[Any, Any, list[Figure]]]
PHASES: dict[str, Phase] = {
    "mix": mix,
    "disconnects": disconnects,
    "overload": overload,
    "connections": connections,
    "control": control,
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", choices=tuple(PHASES), action="append", help="a phase; repeatable")
    parser.add_argument("--minutes", type=float, default=30, help="of the mix; a tenth of it for the control")
    parser.add_argument("--max-words", type=int, default=60, help="of a prompt of the mix")
    parser.add_argument("--disconnects", type=int, default=300, help="clients that leave one at a time")
    parser.add_argument("--slots", type=int, default=32, help="max_batch_size of its logits stage")
    parser.add_argument("--load", type=float, default=5, help="times the capacity, in the overload")
    parser.add_argument("--seconds", type=float, default=60, help="of each half of the overload")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--idle", type=int, default=5000, help="connections")
    parser.add_argument("--serve", action="append", default=[], metavar="FLAG", help="for `genserve serve`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
