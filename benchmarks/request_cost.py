"""Request cost: the CPU time of the event loop for each short request, beside another checkout of genserve.

    python benchmarks/request_cost.py --repository model_repository --model smollm2 --checkout ../before

Both servers run in turns, and answer the same requests. Prints the least microseconds of each, as other
processes of the machine only add to them: the CPU time of the server's main thread, on which its event loop
runs, divided by the number of requests. The requests that a full model rejects go to servers whose only slot
is taken. Linux only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from servers import Running, both_checkouts, measured_in_turns
from stream_cost import event_loop_s

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "ignore_eos": True}
HELD = """
import time
from pathlib import Path

class TritonPythonModel:
    async def decode(self, sequence):
        sequence.append(await sequence.sample())
        while not Path({gate!r}).exists():
            time.sleep(0.01)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests of one kind."""

    path: str = "/v1/chat/completions"
    body: Mapping[str, object]
    status: int = 200
    concurrency: int = 1


CASES: Mapping[str, Case] = {
    "chat": Case(body=CHAT),
    "chat, 8 at a time": Case(body=CHAT, concurrency=8),
    "chat, streamed": Case(body=CHAT | {"stream": True}),
    "messages": Case(path="/v1/messages", body={name: CHAT[name] for name in ("messages", "max_tokens")}),
    "generate": Case(path="/generate", body={"inputs": "Hello", "parameters": {"max_new_tokens": 1}}),
    "invalid": Case(body=CHAT | {"temperature": -1}, status=400),
    "no such route": Case(path="/v1/nothing", body=CHAT, status=404),
}
FULL: Mapping[str, Case] = {"rejected": Case(body=CHAT, status=429)}


def answer(port: int, case: Case, *, count: int) -> None:
    """Send requests one after another on one connection."""
    text, headers = json.dumps(case.body), {"content-type": "application/json"}
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        for _ in range(count):
            connection.request("POST", case.path, text, headers)
            response = connection.getresponse()
            if response.read() and response.status != case.status:
                raise SystemExit(f"{case.path} answers {response.status}, not {case.status}")


def cost_us(server: Running, *, case: Case, count: int) -> float:
    """Send requests to a server, and return the CPU time for each of them."""
    before = event_loop_s(server.pid)
    with ThreadPoolExecutor(case.concurrency) as threads:
        each = count // case.concurrency
        for _ in threads.map(lambda _: answer(server.http, case, count=each), range(case.concurrency)):
            pass
    return (event_loop_s(server.pid) - before) / (each * case.concurrency) * 1e6


def compare(servers: Mapping[str, Running], cases: Mapping[str, Case], options: argparse.Namespace) -> None:
    """Print the cost of each case on each server."""
    for name, case in cases.items():
        if options.case and name not in options.case:
            continue
        measure = partial(cost_us, case=case, count=options.requests)
        costs = measured_in_turns(servers, measure, rounds=options.rounds)
        other, this = min(costs["other"]), min(costs["this"])
        line = f"{name:20} other {other:6.0f} us, this {this:6.0f} us per request, ratio {this / other:.2f}"
        print(line, flush=True)


def held(repository: Path, *, model: str, gate: Path) -> Path:
    """Copy a repository, with a model of one slot whose answers wait for the file `gate`."""
    copy = gate.parent / "repository"
    shutil.copytree(repository, copy)
    for config in copy.glob(f"{model}*/config.pbtxt"):
        sizes = r"(max_batch_size|max_candidate_sequences): \d+"
        config.write_text(re.sub(sizes, r"\1: 1", config.read_text()))
    (copy / f"{model}_decoder" / "1" / "model.py").write_text(HELD.format(gate=str(gate)))
    return copy


def take_slot(server: Running) -> None:
    """Send a request, and return when its answer has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http)
    body = json.dumps(CHAT | {"max_tokens": 2, "stream": True})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    connection.getresponse()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--checkout", type=Path, required=True, help="folder of the other genserve")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--case", action="append", help="one of the cases; all by default")
    options = parser.parse_args()
    with both_checkouts(options.checkout, options.repository) as servers:
        compare(servers, CASES, options)
    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder) / "gate"
        full = held(options.repository, model=options.model, gate=gate)
        with both_checkouts(options.checkout, full, flags=("--max-queue=0",)) as servers:
            try:
                for server in servers.values():
                    take_slot(server)
                compare(servers, FULL, options)
            finally:
                gate.touch()


if __name__ == "__main__":
    main()
