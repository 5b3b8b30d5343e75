"""On demand: more models than memory, for clients that ask for all of them in random order and often leave.

    python benchmarks/on_demand.py --model-repository model_repository --minutes 10

serves copies of a text model under names of their own, in a budget for some of them. Each client asks for a
random copy, streamed or whole, and leaves a part of the answers early. Prints a table: the requests that
failed, the answers that differ from the first one of their model (all are greedy), the most memory that the
loaded models had reserved and the process had taken, how long clients waited, and how long loads took.
Exits with 1 if a request failed, an answer differs, or the budget was exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import numpy as np
from report import markdown
from servers import Running, genserve_server


@dataclass
class Outcome:
    """What has happened so far.

    Attributes:
        texts: the first whole answer of each model.
        waits_s: from each request to the first byte of its answer's body.
    """

    texts: dict[str, str] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)
    num_left: int = 0
    failures: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    most_reserved_bytes: int = 0
    most_resident_bytes: int = 0


def copy_model(repository: Path, model: str, root: Path, name: str, *, cache_bytes: int) -> None:
    """Copy a text model and its stages under another name; the weights are linked."""
    for folder in [repository / model, *repository.glob(f"{model}_*")]:
        copied = root / folder.name.replace(model, name, 1)
        shutil.copytree(folder, copied, copy_function=os.link)
        config = copied / "config.pbtxt"
        text = config.read_text().replace(model, name)
        if folder.name == f"{model}_logits" and not re.search(r'(?m)^[^#\n]*"kv_cache_bytes"', text):
            value = f'{{ string_value: "{cache_bytes}" }}'
            text += f'parameters [ {{ key: "kv_cache_bytes" value: {value} }} ]\n'
        config.unlink()     # it is a link, too
        config.write_text(text)


def run_client(url: str, names: list[str], *, seed: int, until_s: float, outcome: Outcome) -> None:
    """Ask for random models until a time of `time.monotonic`."""
    rng = random.Random(seed)
    with httpx2.Client(base_url=url, timeout=300) as http:
        while time.monotonic() < until_s:
            name, streams = rng.choice(names), rng.random() < 0.7
            body = {
                "model": name, "prompt": "The sea is", "temperature": 0, "max_tokens": 16, "stream": streams,
            }  # fmt: skip
            leaves, started_s = rng.random() < 0.2, time.monotonic()
            try:
                with http.stream("POST", "/v1/completions", json=body) as response:
                    if leaves and streams:
                        next(response.iter_raw(), b"")
                        outcome.num_left += 1
                        continue
                    answer = response.read().decode()
                outcome.waits_s.append(response.elapsed.total_seconds())
                if response.status_code != 200 or '"error"' in answer:
                    outcome.failures.append(answer[:500])
                    continue
                text = _text(answer, streams=streams)
                if outcome.texts.setdefault(name, text) != text:
                    outcome.differing.append(name)
            except httpx2.HTTPError as error:
                outcome.failures.append(f"{error!r} after {time.monotonic() - started_s:.1f} s")
            time.sleep(rng.expovariate(5))


def _text(answer: str, *, streams: bool) -> str:
    if not streams:
        return str(json.loads(answer)["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def watch_memory(server: Running, *, over: threading.Event, outcome: Outcome) -> None:
    """Look at the memory ten times a second."""
    status = Path(f"/proc/{server.pid}/status")
    with httpx2.Client(base_url=f"http://127.0.0.1:{server.http}") as http:
        while not over.wait(0.1):
            loaded = http.get("/api/ps").json()["models"]
            reserved = sum(model["size"] for model in loaded)
            outcome.most_reserved_bytes = max(outcome.most_reserved_bytes, reserved)
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            resident = int(fields["VmRSS"].split()[0]) * 1024
            outcome.most_resident_bytes = max(outcome.most_resident_bytes, resident)


def load_figures(server: Running) -> tuple[int, float, int]:
    """Return the number of loads, their mean duration in seconds, and the unloads for want of memory."""
    text = httpx2.get(f"http://127.0.0.1:{server.http}/metrics").text
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("genserve_model_"))
    values = {name: float(value) for name, value in lines}
    count = values["genserve_model_load_seconds_count"]
    mean_s = values["genserve_model_load_seconds_sum"] / max(1.0, count)
    return int(count), mean_s, int(values['genserve_model_unloads_total{reason="memory"}'])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--models", type=int, default=5, help="the number of copies")
    parser.add_argument("--fit", type=int, default=2, help="how many of them fit into the budget")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cache-bytes", type=int, default=2**26, help="the size of each KV cache")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    names = [f"copy{number}" for number in range(1, flags.models + 1)]
    # Links need the file system of the weights.
    with tempfile.TemporaryDirectory(dir=flags.model_repository.parent) as folder:
        root = Path(folder)
        for name in names:
            copy_model(flags.model_repository, flags.model, root, name, cache_bytes=flags.cache_bytes)
        files = sum(file.stat().st_size for file in root.glob(f"{names[0]}*/1/**/*") if file.is_file())
        budget = flags.fit * (files + flags.cache_bytes)
        outcome, over = Outcome(), threading.Event()
        mode = ["--model-control-mode=on-demand", f"--model-memory-budget={budget}"]
        with genserve_server(root, flags=mode) as server, ThreadPoolExecutor(flags.clients + 1) as pool:
            url, until_s = f"http://127.0.0.1:{server.http}", time.monotonic() + 60 * flags.minutes
            watching = pool.submit(watch_memory, server, over=over, outcome=outcome)
            clients = [
                pool.submit(run_client, url, names, seed=seed, until_s=until_s, outcome=outcome)
                for seed in range(flags.clients)
            ]
            for client in clients:
                client.result()
            over.set()
            watching.result()
            num_loads, load_s, num_unloads = load_figures(server)
    waits = np.percentile(outcome.waits_s, [50, 95, 100])
    figures = {
        "requests": len(outcome.waits_s) + outcome.num_left,
        "clients that left": outcome.num_left,
        "failed": len(outcome.failures),
        "differing answers": len(outcome.differing),
        "budget, MiB": budget / 2**20,
        "reserved at most, MiB": outcome.most_reserved_bytes / 2**20,
        "process at most, MiB": outcome.most_resident_bytes / 2**20,
        "loads": num_loads,
        "mean load, s": load_s,
        "unloads for memory": num_unloads,
        "wait, median, s": waits[0],
        "wait, 95th percentile, s": waits[1],
        "longest wait, s": waits[2],
    }
    written = [(name, f"{value:,.2f}".removesuffix(".00")) for name, value in figures.items()]
    print(markdown(("", ""), written))
    for failure in outcome.failures[:5]:
        print(failure, file=sys.stderr)
    if flags.json:
        flags.json.write_text(json.dumps(figures))
    if outcome.failures or outcome.differing or outcome.most_reserved_bytes > budget:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
