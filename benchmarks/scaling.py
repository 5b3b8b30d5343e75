"""Scaling: what replicas on Ray Serve carry together, and what the way to them costs.

    python benchmarks/scaling.py --model-repository model_repository --plot scaling.png

deploys the repository on a Ray cluster of this machine, as `genserve deploy ray` does, with 1, 2, 3 and 8
replicas. Their logits stage only waits as long as a measured one computes (`waiting_deployment.py`), so that
a few cores can run all of them; the rest is the product: Serve's HTTP proxy, ingress, router, replicas. Each
number of replicas gets the same number of streams per replica. `x1` is the ratio to one replica, and ideal
are the tokens per second of the waits alone.

Then single requests go, in turns, to a server without Ray (`genserve serve`), to the same server in one
process behind Serve's proxy, and to the deployment. The differences of the times to the first token are what
the proxy adds, and what ingress and router add.

CPU time per token is that of each kind of process. The client, Ray and all replicas share the cores of this
machine: as soon as these are busy, the machine limits the tokens per second, and a line says so.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from raw_client import RawClient
from report import markdown
from servers import cpu_s, free_port, genserve_server
from targets import Work, server_at
from waiting_deployment import ALONE, environment
from waiting_logits import StepCost

from genserve.cli.plots import check_plot, new_figure
from genserve.deploy.ray.deploy_config import Scale, ServeEndpoint, find_models, serve_config
from genserve.deploy.ray.serve_cluster import ServeCluster, local_cluster

NAME = "genserve"
WAITING_BUILDER, ALONE_BUILDER = "waiting_deployment:build", "waiting_deployment:build_alone"
HEADINGS = ("replicas", "streams", "tokens/s", "ideal", "x1", "first token p50, ms", "p99, ms", "CPU busy")
KINDS = {
    "proxy": "ray::ProxyActor",
    "ingress and router": f"ray::ServeReplica:{NAME}:ingress",
    "replicas": f"ray::ServeReplica:{NAME}:",
    "rest of Ray": "",
}
_BUSY = 0.8     # of all cores: above this, the machine and not the replicas may be what is measured
_NUM_FIRST = 20     # rounds that only warm up


def main() -> None:
    options = _options()
    if options.plot:
        check_plot(options.plot)
    cost = StepCost(step_s=options.step_ms / 1e3, token_s=options.token_ms / 1e3, attended_s=0.0)
    os.environ |= environment(cost)
    with deployed(options, num_replicas=options.replicas[0]) as deployment:
        rows = [_measure(deployment, number, options) for number in options.replicas]
        first = compare_first_tokens(deployment, options)
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
    if options.plot:
        draw(rows, options.plot)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "first_token": first}, indent=2))


class Deployment:
    """A deployed application, whose replicas are set one number after another."""

    def __init__(self, cluster: ServeCluster, config: dict[str, Any], *, model: str, port: int) -> None:
        self.model = model
        self.port = port
        self._cluster = cluster
        self._config = config

    def scale_to(self, num_replicas: int) -> None:
        """Set the number of replicas, and wait until all answer."""
        for options in self._config["applications"][0]["deployments"]:
            if options["name"] == self.model:
                options["num_replicas"] = num_replicas
        self._cluster.deploy(self._config)
        time.sleep(1.0)     # until Serve knows that it has something to do
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
        settings={"allow_unauthenticated": True},
        endpoint=ServeEndpoint(name=NAME, port=port),
        scale=Scale(min_replicas=num_replicas, max_replicas=num_replicas),
    )
    config["applications"][0]["import_path"] = WAITING_BUILDER
    for deployment in config["applications"][0]["deployments"]:
        deployment["ray_actor_options"]["num_cpus"] = 0.1   # a replica only waits
    alone = {"name": "alone", "route_prefix": ALONE, "import_path": ALONE_BUILDER}
    config["applications"].append({**alone, "args": config["applications"][0]["args"]})
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
    server.measure(work)    # connections and caches
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


def compare_first_tokens(deployment: Deployment, options: argparse.Namespace) -> dict[str, Any]:
    """Send single requests to the server, the server behind the proxy, and the deployment, in turns."""
    command = (sys.executable, str(Path(__file__).with_name("waiting_deployment.py")))
    with genserve_server(options.model_repository, command=command) as server:
        targets = {
            "server": (RawClient(server.http), ""),
            "server behind the proxy": (RawClient(deployment.port), ALONE),
            "deployment": (RawClient(deployment.port), ""),
        }
        times_ms = asyncio.run(_first_tokens(targets, deployment.model, options))
    alone, proxied, whole = (np.array(times) for times in times_ms.values())
    times = {**times_ms, "added by the proxy": proxied - alone, "by ingress and router": whole - proxied}
    return {
        name: {f"p{share}_ms": float(np.percentile(values, share)) for share in (10, 50, 99)}
        for name, values in times.items()
    }


async def _first_tokens(
    targets: Mapping[str, tuple[RawClient, str]], model: str, options: argparse.Namespace
) -> dict[str, list[float]]:
    """The milliseconds to the first token of each request, by target; a request of each in each round."""
    times_ms: dict[str, list[float]] = {name: [] for name in targets}
    names = list(targets)
    for number in range(_NUM_FIRST + options.pairs):
        prompt = f"{number} " + "word " * options.prompt_words
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "stream": True}
        for name in random.sample(names, len(names)):
            client, prefix = targets[name]
            answer = await client.post(f"{prefix}/v1/completions", body)
            if answer.status != 200:
                raise SystemExit(f"{name}: {answer.status} {answer.body!r}")
            if number >= _NUM_FIRST:
                times_ms[name].append((answer.first_s - answer.sent_s) * 1e3)
    for client, _ in targets.values():
        client.close()
    return times_ms


def cpu_by_kind() -> dict[str, float]:
    """The CPU time of the processes of the cluster so far, by their kind; Linux only."""
    seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for pid in _descendants(os.getpid()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text()
            kind = next(kind for kind, start in KINDS.items() if title.startswith(start))
            seconds[kind] += cpu_s(pid)
        except OSError:     # it has ended
            continue
    return seconds


def _descendants(pid: int) -> set[int]:
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
    """The time that all cores of this machine have been busy, in total."""
    user, nice, system, _idle, _wait, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the tokens per second over the replicas, and the CPU time of a token by kind of process."""
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
    parser.add_argument("--pairs", type=int, default=300, help="requests to each target, for the first token")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
