"""Serve paths: compares genserve's way to a replica with Ray Serve's: first tokens, and CPU time per token.

    flock /tmp/bench.lock python benchmarks/serve_paths.py --model-repository model_repository

deploys one replica with a waiting logits stage (`waiting_deployment.py`) three times on one cluster: with
genserve's own port and connections; with its own port and Serve's handles over gRPC; and with handles and
HAProxy (`handle_deployment.py`). In each round one request is sent to each, in random order, so that a busy
machine delays all alike. Then each serves streams in turn, several times, and the CPU time of a token is the
median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from raw_client import RawClient
from report import markdown
from scaling import descendants, first_tokens
from servers import cpu_s, free_port
from targets import Work, server_at
from waiting_deployment import environment
from waiting_logits import StepCost

from genserve.deploy.ray.deploy_config import Scale, find_models, serve_config
from genserve.deploy.ray.serve_cluster import ServeCluster, local_cluster

PATHS = {
    "own port, own connections": "waiting_deployment:build",
    "own port, handles": "handle_deployment:listening",
    "HAProxy, handles": "handle_deployment:behind_haproxy",
}
_OWN, _, _BEHIND = PATHS
_NUM_FIRST = 20     # rounds that only warm up


def main() -> None:
    options = _options()
    cost = StepCost(step_s=options.step_ms / 1e3, token_s=0.0, attended_s=0.0)
    os.environ |= environment(cost)
    os.environ |= {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
    ports = {name: free_port() for name in PATHS}
    [model, *_] = [one for one in find_models([options.model_repository]) if one.stages]
    with local_cluster(num_cpus=1) as url:
        cluster = ServeCluster(url)
        cluster.deploy(_config(model, ports, options.model_repository))
        time.sleep(1.0)     # gives Serve time to notice the change
        for number, _ in enumerate(PATHS):
            for line in cluster.progress(f"a{number}"):
                print(line, file=sys.stderr)
        clients = {name: RawClient(port) for name, port in ports.items()}
        asyncio.run(first_tokens(clients, model.name, options, rounds=_NUM_FIRST))
        times_ms = asyncio.run(first_tokens(clients, model.name, options, rounds=options.rounds))
        token_us = _cpu_of_tokens(ports, model.name, options)
    own = np.array(times_ms[_OWN])
    rows = []
    for name, times in times_ms.items():
        percentiles = [float(np.percentile(times, share)) for share in (10, 50, 99)]
        added = float(np.median(np.array(times) - own))
        rows.append([name, *(f"{value:.1f}" for value in (*percentiles, added))])
    print(markdown(("first token, ms", "p10", "p50", "p99", "later than own, median"), rows))
    print()
    kinds = list(next(iter(token_us.values())))
    table = [[name, *(f"{us[kind]:.0f}" for kind in kinds)] for name, us in token_us.items()]
    print(markdown(("CPU time per token, us", *kinds), table))
    if options.json:
        options.json.write_text(json.dumps({"first_token_ms": times_ms, "cpu_us": token_us}))


def _config(model: Any, ports: dict[str, int], repository: Path) -> dict[str, Any]:
    applications = []
    for number, (name, builder) in enumerate(PATHS.items()):
        config = serve_config(
            [model],
            roots=[repository],
            name=f"a{number}",
            settings={"http_port": free_port() if name == _BEHIND else ports[name]},
            scale=Scale(min_replicas=1, max_replicas=1),
        )
        [application] = config["applications"]
        application["import_path"] = builder
        if name == _BEHIND:
            application["route_prefix"] = "/"
        for deployment in application["deployments"]:
            deployment["ray_actor_options"]["num_cpus"] = 0.1   # a replica only waits
        applications.append(application)
    proxies = {"host": "127.0.0.1", "port": ports[_BEHIND]}
    return {**config, "proxy_location": "EveryNode", "http_options": proxies, "applications": applications}


def _cpu_of_tokens(
    ports: dict[str, int], model: str, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return the CPU time of a token in microseconds, by path and kind of process."""
    work = Work(
        concurrency=options.streams,
        num_requests=options.streams * 2,
        new_tokens=options.new_tokens,
        prompt_words=options.prompt_words,
    )
    found: dict[str, list[dict[str, float]]] = {name: [] for name in PATHS}
    for round_number in range(options.cpu_rounds + 1):
        for name in random.sample(list(PATHS), len(PATHS)):
            before_s = _cpu_s(list(PATHS).index(name))
            measured = server_at(ports[name], model=model).measure(work)
            after_s = _cpu_s(list(PATHS).index(name))
            num_tokens = sum(measured["new_tokens"])
            used_us = {kind: (after_s[kind] - before_s[kind]) / num_tokens * 1e6 for kind in after_s}
            if round_number:    # the first round warms up
                found[name].append(used_us)
    return {
        name: {kind: float(np.median([one[kind] for one in several])) for kind in several[0]}
        for name, several in found.items()
    }


def _cpu_s(number: int) -> dict[str, float]:
    """Return the CPU time so far of the processes on one path: an application's processes, and HAProxy."""
    kinds = {"ingress": f"ray::ServeReplica:a{number}:ingress", "replica": f"ray::ServeReplica:a{number}:"}
    seconds = dict.fromkeys((*kinds, "HAProxy"), 0.0)
    for pid in descendants(os.getpid()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text()
            if "haproxy" in title.partition("\0")[0]:
                seconds["HAProxy"] += cpu_s(pid)
            for kind, start in kinds.items():
                if title.startswith(start):
                    seconds[kind] += cpu_s(pid)
                    break
        except OSError:     # the process has ended
            continue
    return seconds


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of a step of the logits stage")
    parser.add_argument("--rounds", type=int, default=300, help="for the first token")
    parser.add_argument("--pause-ms", type=float, default=10.0, help="before each request of a round")
    parser.add_argument("--cpu-rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompt-words", type=int, default=40)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
