"""Failover: what clients notice when a replica of a deployment is killed under their streams.

    python benchmarks/failover.py --model-repository model_repository --model smollm2

starts `genserve deploy ray` on this machine with three replicas, and sends streams of all dialects, half of
them greedy and half seeded, once without a disturbance and once with `kill -9` of a replica's process while
all of them run. Prints how many answers were lost or differ, and how long the streams paused.

Exits with 1 if an answer was lost or differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx2
import numpy as np
from report import markdown
from servers import free_port
from streamed_texts import StreamedAnswer, requests_of, stream_all

KILL_AT = 0.25      # share of the pieces of text that have arrived when the replica is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    url: str
    dashboard: str
    token: str

    def pids(self, name: str) -> list[int]:
        """Return the processes of the running replicas."""
        headers = {"Authorization": f"Bearer {self.token}"}
        details = httpx2.get(f"{self.dashboard}/api/serve/applications/", headers=headers).json()
        replicas = details["applications"]["genserve"]["deployments"][name]["replicas"]
        return [replica["pid"] for replica in replicas if replica["state"] == "RUNNING"]

    def num_interrupted(self, outcome: str) -> int:
        text = httpx2.get(f"{self.url}/metrics").text
        found = re.search(rf'^genserve_interrupted_calls_total{{.*outcome="{outcome}".*}} (\S+)$', text, re.M)
        return 0 if found is None else int(float(found[1]))


def main() -> None:
    options = _options()
    requests = requests_of(options.streams, tokens=options.tokens)
    with deployment(options) as deployed:
        whole = asyncio.run(stream_all(deployed.url, options.model, requests))
        kill = Kill(deployed, options.model, after=int(KILL_AT * sum(len(a.times_s) for a in whole)))
        killed = asyncio.run(stream_all(deployed.url, options.model, requests, on_text=kill.count))
        resumed, retried, failed = map(deployed.num_interrupted, ("resumed", "retried", "failed"))
    errors = [answer.error for answer in (*whole, *killed) if answer.error]
    print("\n".join(errors), file=sys.stderr)
    lost = sum(bool(answer.error) for answer in killed)
    different = sum(one.text != other.text for one, other in zip(whole, killed, strict=True))
    pauses = sorted((pause_after(answer, kill.time_s) for answer in killed), reverse=True)
    interrupted, others = pauses[: resumed + retried], pauses[resumed + retried :]
    figures = {
        "streams": len(requests),
        "lost": lost,
        "different texts": different,
        "resumed, retried, failed calls": f"{resumed}, {retried}, {failed}",
        "pause of an interrupted stream, p50": milliseconds(interrupted, 50),
        "p99": milliseconds(interrupted, 99),
        "longest gap of another stream at that time, p50": milliseconds(others, 50),
        "p99 ": milliseconds(others, 99),
        "longest gap of a stream without a kill, p50": milliseconds([pause_after(a, 0) for a in whole], 50),
    }
    print(markdown(["", "measured"], [[name, str(value)] for name, value in figures.items()]))
    if options.json:
        options.json.write_text(json.dumps(figures))
    sys.exit(lost + different > 0)


class Kill:
    """Kills a replica when a number of pieces of text have arrived."""

    def __init__(self, deployed: Deployment, model: str, *, after: int) -> None:
        self._pid = deployed.pids(model)[0]
        self._left = after
        self.time_s = 0.0

    def count(self) -> None:
        self._left -= 1
        if not self._left:
            self.time_s = time.monotonic()
            os.kill(self._pid, signal.SIGKILL)


def pause_after(answer: StreamedAnswer, since_s: float) -> float:
    """Return the longest time between two pieces of text, the second of which came after `since_s`."""
    times = answer.times_s
    gaps = [after - before for before, after in pairwise(times) if after > since_s]
    return max(gaps, default=0.0)


def milliseconds(seconds: Sequence[float], percentile: int) -> str:
    return f"{np.percentile(seconds, percentile) * 1000:.0f} ms" if seconds else "-"


@contextmanager
def deployment(options: argparse.Namespace) -> Iterator[Deployment]:
    """Run `genserve deploy ray` on a free port within the context."""
    token = secrets.token_hex(32)
    command = [
        *(sys.executable, "-W", "ignore", "-m", "genserve", "deploy", "ray", options.model),
        f"--model-repository={options.model_repository}",
        f"--min-replicas={options.replicas}",
        f"--port={free_port()}",
    ]
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            ready, dashboard = process.stdout.readline(), process.stdout.readline()
            if not ready.startswith("Ready at "):
                sys.exit("the deployment did not start")
            yield Deployment(url=ready.split()[2], dashboard=dashboard.split()[-1], token=token)
        finally:
            process.send_signal(signal.SIGINT)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
