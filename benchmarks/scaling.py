"""Scaling: the throughput of several replicas on Ray Serve, and the cost of the way to them.

    python benchmarks/scaling.py --model-repository model_repository --plot scaling.png

deploys the repository on a Ray cluster of this machine, as `genserve deploy ray` does, with 1, 2, 3 and 8
replicas. Their logits stage only waits as long as a measured one computes (`waiting_deployment.py`), so that
a few cores can run all replicas; ingress, router and replicas are the product's. Each number of replicas gets
the same number of streams per replica. `x1` is the ratio to one replica, and ideal are the tokens per second
of the waits alone.

Then single requests are sent, with pauses: in each round one to the deployment and two to a server in one
process (`genserve serve`), in random order. The difference in each round is what the deployment adds to the
time to the first token, and the difference of the two requests to the server is the noise.

CPU time per token is given for each kind of process. The client, Ray and all replicas share the cores of this
machine: as soon as the cores are busy, the machine limits the tokens per second, and a line says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from raw_client import RawClient
from report import markdown
from servers import cpu_s, free_port, genserve_server
from targets import Work, server_at
from waiting_deployment import environment
from waiting_logits import StepCost

from genserve.cli.plots import check_plot, new_figure
from genserve.deploy.ray.deploy_config import Scale, find_models, serve_config
from genserve.deploy.ray.serve_cluster import ServeCluster, local_cluster

NAME = "genserve"
WAITING_BUILDER = "waiting_deployment:build"
HEADINGS = ("replicas", "streams", "tokens/s", "ideal", "x1", "first token p50, ms", "p99, ms", "CPU busy")
KINDS = {
    "ingress and router": f"ray::ServeReplica:{NAME}:ingress",
    "replicas": f"ray::ServeReplica:{NAME}:",
    "rest of Ray": "",
}
_BUSY = 0.8         # share of all cores; above it, the machine may be the bottleneck
_NUM_FIRST = 20     # rounds that only warm up


def main() -> None:
    options = _options()
    if options.plot:
        check_plot(options.plot)
    cost = StepCost(step_s=options.step_ms / 1e3, token_s=options.token_ms / 1e3, attended_s=0.0)
    os.environ |= environment(cost)
    with deployed(options, num_replicas=options.replicas[0]) as deployment:
        rows = [_measure(deployment, number, options) for number in options.replicas]
        first, first_busy, first_cpu_ms = compare_first_tokens(deployment, options)
    print(markdown(HEADINGS, [_row(row, rows[0]) for row in rows]))
    for row in rows:
        if row["busy"] > _BUSY:
            print(f"with {_number(row)} replicas the {os.cpu_count()} cores of this machine are the limit")
    print()
    print(markdown(("CPU time per token, us", *map(_number, rows)), _cpu_rows(rows)))
    print()
    headings = ("first token, ms", "p10", "p50", "p99")
    rows_ms = [[name, *(f"{value:.1f}" for value in times.values())] for name, times in first.items()]
    print(markdown(headings, rows_ms))
    print(f"with {first_busy:.0%} of the cores busy")
    print()
    cpu_rows = [[kind, f"{ms:.1f}"] for kind, ms in first_cpu_ms.items()]
    print(markdown(("CPU time per request, ms", ""), cpu_rows))
    if options.plot:
        draw(rows, options.plot)
    if options.json:
        figures = {"rows": rows, "first_token": first, "cpu_ms_per_request": first_cpu_ms}
        options.json.write_text(json.dumps(figures, indent=2))


class Deployment:
    """A deployed application, whose number of replicas can be changed."""

    def __init__(self, cluster: ServeCluster, config: dict[str, Any], *, model: str, port: int) -> None:
        self.model = model
        self.port = port
        self._cluster = cluster
        self._config = config

    def scale_to(self, num_replicas: int) -> None:
        """Set the number of replicas, and wait until all of them answer."""
        for options in self._config["applications"][0]["deployments"]:
            if options["name"] == self.model:
                options["num_replicas"] = num_replicas
        self._cluster.deploy(self._config)
        time.sleep(1.0)     # gives Serve time to notice the change
        for application in self._config["applications"]:
            for line in self._cluster.progress(application["name"]):
                print(line, file=sys.stderr)


@contextmanager
def deployed(options: argparse.Namespace, *, num_replicas: int) -> Iterator[Deployment]:
    """Deploy the repository on a cluster of this machine."""
    roots, port = [options.model_repository], free_port()
    models = [model for model in find_models(roots, options.model) if model.stages]
    config = serve_config(
        models[:1],
        roots=roots,
        name=NAME,
        settings={"http_port": port},
        scale=Scale(min_replicas=num_replicas, max_replicas=num_replicas),
    )
    config["applications"][0]["import_path"] = WAITING_BUILDER
    for deployment in config["applications"][0]["deployments"]:
        deployment["ray_actor_options"]["num_cpus"] = 0.1   # a replica only waits
    with local_cluster(num_cpus=1) as url:
        deployment = Deployment(ServeCluster(url), config, model=models[0].name, port=port)
        deployment.scale_to(num_replicas)
        yield deployment


def _measure(deployment: Deployment, num_replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the tokens per second of a number of replicas."""
    deployment.scale_to(num_replicas)
    server = server_at(deployment.port, model=deployment.model)
    streams = num_replicas * options.streams
    work = Work(
        concurrency=streams,
        num_requests=streams * options.waves,
        new_tokens=options.new_tokens,
        prompt_words=options.prompt_words,
    )
    server.measure(work)    # warms up connections and caches
    before_s, busy_s, started_s = cpu_by_kind(), busy_cores_s(), time.perf_counter()
    measured = server.measure(work)
    seconds = time.perf_counter() - started_s
    busy_s = busy_cores_s() - busy_s
    cpu_s_by_kind = {kind: now_s - before_s[kind] for kind, now_s in cpu_by_kind().items()}
    num_tokens = sum(measured["new_tokens"])
    first_ms = np.array(measured["first_text_s"]) * 1e3
    step_s = options.step_ms / 1e3 + options.token_ms / 1e3 * options.streams
    return {
        "replicas": float(num_replicas),
        "streams": float(streams),
        "tokens_per_s": num_tokens / measured["elapsed_s"],
        "ideal": streams / step_s,
        "first_p50_ms": float(np.percentile(first_ms, 50)),
        "first_p99_ms": float(np.percentile(first_ms, 99)),
        "busy": busy_s / seconds / (os.cpu_count() or 1),
        "cpu_us": {kind: cpu / num_tokens * 1e6 for kind, cpu in cpu_s_by_kind.items()},
    }


def compare_first_tokens(
    deployment: Deployment, options: argparse.Namespace
) -> tuple[dict[str, dict[str, float]], float, dict[str, float]]:
    """Send single requests to a server and to the deployment, in turns.

    Returns:
        Percentiles of the milliseconds to the first token, the share of the cores that was busy, and the
        milliseconds of CPU time per request by kind of process.
    """
    command = (sys.executable, str(Path(__file__).with_name("waiting_deployment.py")))
    with genserve_server(options.model_repository, command=command) as server:
        clients = {
            "server": RawClient(server.http),
            "server, again": RawClient(server.http),
            "deployment": RawClient(deployment.port),
        }
        asyncio.run(first_tokens(clients, deployment.model, options, rounds=_NUM_FIRST))
        before_s, server_s = cpu_by_kind(besides={server.pid}), cpu_s(server.pid)
        busy_s, started_s = busy_cores_s(), time.perf_counter()
        times_ms = asyncio.run(first_tokens(clients, deployment.model, options, rounds=options.pairs))
        seconds = time.perf_counter() - started_s
        busy = (busy_cores_s() - busy_s) / seconds / (os.cpu_count() or 1)
        after_s = cpu_by_kind(besides={server.pid})
        cpu_ms = {kind: (now_s - before_s[kind]) / options.pairs * 1e3 for kind, now_s in after_s.items()}
        cpu_ms["server"] = (cpu_s(server.pid) - server_s) / options.pairs / 2 * 1e3
    alone, again, whole = (np.array(times) for times in times_ms.values())
    times = {**times_ms, "added by the deployment": whole - alone, "noise: by the server": again - alone}
    percentiles = {
        name: {f"p{share}_ms": float(np.percentile(values, share)) for share in (10, 50, 99)}
        for name, values in times.items()
    }
    return percentiles, busy, cpu_ms


async def first_tokens(
    clients: Mapping[str, RawClient], model: str, options: argparse.Namespace, *, rounds: int
) -> dict[str, list[float]]:
    """Return the milliseconds to the first token of each request by target, one in each round."""
    times_ms: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(rounds):
        for name in random.sample(list(clients), len(clients)):
            # The prompt is as long as all others, and in no prefix cache.
            prompt = f"{random.randrange(10**8, 10**9)} " + "word " * options.prompt_words
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "stream": True}
            await asyncio.sleep(options.pause_ms / 1e3)
            answer = await clients[name].post("/v1/completions", body)
            if answer.status != 200:
                raise SystemExit(f"{name}: {answer.status} {answer.body!r}")
            times_ms[name].append((answer.first_s - answer.sent_s) * 1e3)
    for client in clients.values():
        client.close()
    return times_ms


def cpu_by_kind(*, besides: Collection[int] = ()) -> dict[str, float]:
    """Return the CPU time so far of the cluster's processes, by kind; Linux only."""
    seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for pid in descendants(os.getpid()).difference(besides):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text()
            kind = next(kind for kind, start in KINDS.items() if title.startswith(start))
            seconds[kind] += cpu_s(pid)
        except OSError:     # the process has ended
            continue
    return seconds


def descendants(pid: int) -> set[int]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children[int(fields[1])].append(int(stat.parent.name))
    found, new = set[int](), [pid]
    while new:
        new = [child for parent in new for child in children[parent]]
        found.update(new)
    return found


def busy_cores_s() -> float:
    """Return the total time that the cores of this machine have been busy."""
    user, nice, system, _idle, _wait, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw tokens per second over the number of replicas, and CPU time per token by kind of process."""
    figure = new_figure()
    rates, times = figure.subplots(1, 2)
    numbers = [row["replicas"] for row in rows]
    rates.plot(numbers, [row["tokens_per_s"] for row in rows], marker="o", label="measured")
    line = [rows[0]["tokens_per_s"] / numbers[0] * number for number in numbers]
    rates.plot(numbers, line, linestyle="--", color="gray", label="linear")
    rates.set(xlabel="replicas", ylabel="tokens per second", xlim=(0, None), ylim=(0, None))
    rates.legend()
    bottom = np.zeros(len(rows))
    for kind in KINDS:
        heights = np.array([row["cpu_us"][kind] for row in rows])
        times.bar([_number(row) for row in rows], heights, bottom=bottom, label=kind)
        bottom += heights
    times.set(xlabel="replicas", ylabel="microseconds of CPU time per token")
    times.legend()
    figure.savefig(path)


def _row(row: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    return [
        _number(row),
        f"{row['streams']:.0f}",
        f"{row['tokens_per_s']:.1f}",
        f"{row['ideal']:.1f}",
        f"{row['tokens_per_s'] / first['tokens_per_s']:.2f}",
        f"{row['first_p50_ms']:.0f}",
        f"{row['first_p99_ms']:.0f}",
        f"{row['busy']:.0%}",
    ]


def _cpu_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [[kind, *(f"{row['cpu_us'][kind]:.0f}" for row in rows)] for kind in KINDS]


def _number(row: Mapping[str, Any]) -> str:
    return f"{row['replicas']:.0f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--model", nargs=1, default=[], help="a text model; default: the first one")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 3, 8])
    parser.add_argument("--step-ms", type=float, default=100.0, help="of a step of the logits stage")
    parser.add_argument("--token-ms", type=float, default=0.3, help="of each token in it")
    parser.add_argument("--streams", type=int, default=4, help="of each replica")
    parser.add_argument("--waves", type=int, default=3, help="requests of each stream, one after another")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=300, help="rounds, for the first token")
    parser.add_argument("--pause-ms", type=float, default=10.0, help="before each request of a round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
