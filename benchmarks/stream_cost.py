"""Stream cost: the CPU time of the event loop per streamed token, compared with another checkout of genserve.

    python benchmarks/stream_cost.py --repository model_repository --model smollm2 --checkout ../before

Both servers run in turns, and stream the same requests. Prints the median microseconds of each: the CPU time
of the server's main thread, on which its event loop runs, divided by the number of tokens. Linux only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from servers import Running, both_checkouts, measured_in_turns

CASES: Mapping[str, Mapping[str, object]] = {
    "chat": {"stream_options": None},
    "chat, with usage": {},
    "chat, logprobs": {"logprobs": True, "top_logprobs": 5},
}


def event_loop_s(pid: int) -> float:
    """Return the CPU time of the main thread of a process."""
    nanoseconds = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]
    return int(nanoseconds) / 1e9


def cost_us(server: Running, *, options: argparse.Namespace, extra: Mapping[str, object]) -> float:
    """Stream requests to a server, and return the CPU time per token."""
    before = event_loop_s(server.pid)
    load = [
        *(sys.executable, "-m", "genserve", "bench", options.model), f"--url=http://127.0.0.1:{server.http}",
        f"--max-concurrency={options.concurrency}", f"--num-prompts={options.concurrency}",
        f"--output-len={options.new_tokens}", f"--extra-body={json.dumps(extra)}", "--num-warmups=0",
    ]
    subprocess.run(load, check=True, stdout=subprocess.PIPE)
    num_tokens = options.concurrency * options.new_tokens
    return (event_loop_s(server.pid) - before) / num_tokens * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--checkout", type=Path, required=True, help="folder of the other genserve")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with both_checkouts(options.checkout, options.repository) as servers:
        for case, extra in CASES.items():
            measure = partial(cost_us, options=options, extra=extra)
            costs = measured_in_turns(servers, measure, rounds=options.rounds)
            other, this = (statistics.median(costs[name]) for name in ("other", "this"))
            print(f"{case:20} other {other:6.1f} us, this {this:6.1f} us per token, ratio {this / other:.2f}")


if __name__ == "__main__":
    main()
