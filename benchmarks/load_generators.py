"""Load generators: `genserve bench`, aiperf and guidellm measure the same servers in turns.

    python benchmarks/load_generators.py --model-repository model_repository \\
        --aiperf AIPERF/bin/aiperf --guidellm GUIDELLM/bin/guidellm --llama-server PROGRAM:MODEL.gguf

The servers are a static one, whose times are known, `genserve serve` and llama.cpp's. Each runs its model
on one thread, which leaves the load generator the other core. In each round every tool sends the same
number of chats of the same length to every server, with prompts of its own, so that no prefix cache helps.
`genserve bench` runs twice: the second row shows the noise. A figure is the median of the rounds; in
brackets, the median of the ratios to the first row within the rounds. The server's CPU time shows that it
did the same work, also on a busy machine; Linux only. How long a first token takes depends on when the other
requests arrive, which each tool decides for itself; so for genserve, which measures it too, one column is
the tool's mean divided by the server's, over the same requests. The last table is what `genserve bench`
takes in from a static server that is quicker than it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from report import Figures, markdown, median, ratio
from servers import cpu_s, free_port, genserve_server, running

HERE = Path(__file__).parent
BENCH, AGAIN = "genserve bench", "genserve bench, again"
# The figures by the names of `genserve bench`.
NAMES = {
    "ttft": "first token",
    "tpot": "per output token",
    "e2el": "whole answer",
    "rate": "tokens/s",
    "cpu": "server CPU, s",
    "agreement": "mean first token / server's own",
}
HEADINGS = ("server, tool", *NAMES.values())
CEILING_HEADINGS = ("at once", "tokens/s", "of a core", "tokens per CPU second")
CEILING_CONCURRENCY = (1, 8, 64)
PROMPT_TOKENS, NEW_TOKENS = 40, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A load that is the same for all tools."""

    url: str
    pid: int            # the server's process
    model: str
    tokenizer: Path     # a folder
    concurrency: int
    num_requests: int
    seed: int


Tool = Callable[[str, Work, Path], Figures]
Address = tuple[str, int]   # the URL and the process of a server


class LostRequests(Exception):
    """A tool has not measured all of its work."""


def _require(is_whole: bool, found: object) -> None:  # noqa: FBT001
    if not is_whole:
        raise LostRequests(str(found))


def genserve_bench(_program: str, work: Work, _folder: Path) -> Figures:
    run = _bench(
        work.model,
        f"--url={work.url}",
        f"--max-concurrency={work.concurrency}",
        f"--num-prompts={work.num_requests}",
        f"--tokenizer={work.tokenizer}",
        f"--input-len={PROMPT_TOKENS}",
        f"--output-len={NEW_TOKENS}",
        f"--seed={work.seed}",
        "--num-warmups=0",
        '--extra-body={"temperature": null}',   # as for all other tools
    )
    _require(not run["failed"], run["errors_by_kind"])
    times = {name: run[f"p50_{name}_ms"] for name in ("ttft", "tpot", "e2el")}
    return times | {"rate": run["output_throughput"], "mean_ttft": run["mean_ttft_ms"]}


def aiperf(program: str, work: Work, folder: Path) -> Figures:
    _run(
        *(program, "profile", f"--model={work.model}", f"--url={work.url}", "--endpoint-type=chat"),
        *("--streaming", "--use-server-token-count", f"--tokenizer={work.tokenizer}"),
        *(f"--request-count={work.num_requests}", f"--concurrency={work.concurrency}"),
        f"--synthetic-input-tokens-mean={PROMPT_TOKENS}",
        *(f"--output-tokens-mean={NEW_TOKENS}", "--extra-inputs=ignore_eos:true", "--ui=none"),
        *("--no-gpu-telemetry", "--no-server-metrics", f"--random-seed={work.seed}"),
        f"--artifact-dir={folder}",
    )
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    _require(report["request_count"]["avg"] == work.num_requests, report["request_count"])
    _require(report["output_sequence_length"]["avg"] == NEW_TOKENS, report["output_sequence_length"])
    return {
        "ttft": report["time_to_first_token"]["p50"],
        "tpot": report["inter_token_latency"]["p50"],
        "e2el": report["request_latency"]["p50"],
        "rate": report["output_token_throughput"]["avg"],
        "mean_ttft": report["time_to_first_token"]["avg"],
    }


def guidellm(program: str, work: Work, folder: Path) -> Figures:
    backend = {"target": work.url, "model": work.model, "request_format": "/v1/chat/completions"}
    fields = ",".join(f"{name}={value}" for name, value in backend.items())
    _run(
        *("env", "HF_HUB_OFFLINE=1", program, "run", "--disable-console"),
        f"--backend=kind=openai_http,{fields}",
        f"--profile=kind=concurrent,streams={work.concurrency}",
        f"--constraint=kind=max_requests,count={work.num_requests}",
        f"--tokenizer=kind=hf_auto,model={work.tokenizer}",
        f"--data=kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={NEW_TOKENS}",
        f"--seed=kind=static,value={work.seed}",
        f"--output=kind=json,path={folder}/report.json",
    )
    [measured] = json.loads((folder / "report.json").read_text())["benchmarks"]
    _require(not measured["requests"]["errored"], measured["requests"]["errored"][:1])
    metrics = {name: value["successful"] for name, value in measured["metrics"].items() if name in _GUIDELLM}
    _require(metrics["output_token_count"]["median"] == NEW_TOKENS, metrics["output_token_count"])
    return {
        "ttft": metrics["time_to_first_token_ms"]["median"],
        "tpot": metrics["inter_token_latency_ms"]["median"],
        "e2el": metrics["request_latency"]["median"] * 1e3,
        "rate": metrics["output_tokens_per_second"]["mean"],
        "mean_ttft": metrics["time_to_first_token_ms"]["mean"],
    }


_GUIDELLM = frozenset(
    {
        "time_to_first_token_ms",
        "inter_token_latency_ms",
        "request_latency",
        "output_tokens_per_second",
        "output_token_count",
    }
)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")


def _bench(*flags: str) -> Mapping[str, Any]:
    command = [sys.executable, "-m", "genserve", "bench", "--json", *flags]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    [run] = json.loads(done.stdout)["runs"]
    found: Mapping[str, Any] = run
    return found


@contextmanager
def _static(*, first_ms: float, between_ms: float) -> Iterator[Address]:
    port = free_port()
    command = [sys.executable, str(HERE / "static_server.py"), f"--port={port}"]
    command += [f"--first-ms={first_ms}", f"--between-ms={between_ms}"]
    with running(command, ready_url=f"http://127.0.0.1:{port}/health") as pid:
        yield f"http://127.0.0.1:{port}", pid


@contextmanager
def _genserve(repository: Path, *, model: str) -> Iterator[Address]:
    """Run `genserve serve` on one thread, with a step for each token."""
    with tempfile.TemporaryDirectory() as folder:
        for stage in repository.iterdir():
            copy = Path(folder, stage.name)
            copy.mkdir()
            (copy / "1").symlink_to((stage / "1").resolve())
            config = (stage / "config.pbtxt").read_text()
            if stage.name == f"{model}_logits":
                config += _parameter("speculation", "none") + _parameter("intra_op_thread_count", "1")
            (copy / "config.pbtxt").write_text(config)
        with genserve_server(Path(folder)) as server:
            yield f"http://127.0.0.1:{server.http}", server.pid


def _parameter(name: str, value: str) -> str:
    return f'\nparameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}\n'


@contextmanager
def _llama_server(program: str, model: str, *, concurrency: int) -> Iterator[Address]:
    port = free_port()
    command = [program, "--model", model, "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
    command += ["--parallel", str(concurrency), "--ctx-size", str(concurrency * 1024)]
    with running(command, ready_url=f"http://127.0.0.1:{port}/health") as pid:
        yield f"http://127.0.0.1:{port}", pid


def main() -> None:
    options = _options()
    tools: dict[str, tuple[Tool, str]] = {BENCH: (genserve_bench, ""), AGAIN: (genserve_bench, "")}
    if options.aiperf:
        tools["aiperf"] = (aiperf, options.aiperf)
    if options.guidellm:
        tools["guidellm"] = (guidellm, options.guidellm)
    rounds: dict[tuple[str, str], list[Figures]] = {}
    with ExitStack() as stack:
        addresses = dict(_servers(options, stack))
        for url, _pid in addresses.values():
            _bench(options.model, f"--url={url}", "--max-concurrency=4", "--output-len=16")
        for number in range(1, options.rounds + 1):
            for server, address in addresses.items():
                _round(server, address, tools, rounds, options=options, number=number)
    print(f"\n{_table(rounds)}\n\n{_ceiling()}")
    print(
        f"\nMedians of {options.rounds} rounds; {options.requests} chats, {options.concurrency} at once, "
        f"prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new tokens; times in ms: p50 over the requests."
    )
    if options.json:
        rows = [{"server": server, "tool": tool, "rounds": mine} for (server, tool), mine in rounds.items()]
        options.json.write_text(json.dumps({"arguments": sys.argv[1:], "rows": rows}, indent=2) + "\n")


def _servers(options: argparse.Namespace, stack: ExitStack) -> Iterator[tuple[str, Address]]:
    yield "static, 50 + 10 ms", stack.enter_context(_static(first_ms=50, between_ms=10))
    yield "genserve", stack.enter_context(_genserve(options.model_repository, model=options.model))
    if options.llama_server:
        program, _, model = options.llama_server.partition(":")
        yield "llama-server", stack.enter_context(
            _llama_server(program, model, concurrency=options.concurrency)
        )


def _round(
    server: str,
    address: Address,
    tools: Mapping[str, tuple[Tool, str]],
    rounds: dict[tuple[str, str], list[Figures]],
    *,
    options: argparse.Namespace,
    number: int,
) -> None:
    """Run all tools on one server; each round starts with another tool."""
    ordered = list(tools.items())
    first = (number - 1) % len(ordered)
    for place, (name, (tool, program)) in enumerate(ordered[first:] + ordered[:first]):
        work = Work(
            url=address[0],
            pid=address[1],
            model=options.model,
            tokenizer=(options.model_repository / f"{options.model}_tokenizer" / "1").resolve(),
            concurrency=options.concurrency,
            num_requests=options.requests,
            seed=1000 * number + place,
        )
        figures: dict[str, float] = {}
        rounds.setdefault((server, name), []).append(figures)
        before_s, own_before = cpu_s(work.pid), _own_first_tokens(work.url)
        try:
            with tempfile.TemporaryDirectory() as folder:
                figures |= tool(program, work, Path(folder))
        except LostRequests as lost:
            print(f"round {number}, {server}, {name}: left out, {lost}", file=sys.stderr, flush=True)
            continue
        figures["cpu"] = cpu_s(work.pid) - before_s
        own_after = _own_first_tokens(work.url)
        if own_before and own_after:
            total_s, count = (after - before for before, after in zip(own_before, own_after, strict=True))
            figures["agreement"] = figures["mean_ttft"] / (1e3 * total_s / count)
        summary = ", ".join(f"{key} {value:.1f}" for key, value in figures.items())
        print(f"round {number}, {server}, {name}: {summary}", file=sys.stderr, flush=True)


def _own_first_tokens(url: str) -> tuple[float, float] | None:
    """Return the seconds to all first tokens so far by the server's own clock, and their number."""
    reply = httpx2.get(f"{url}/metrics")
    if not reply.is_success or not reply.headers["content-type"].startswith("text/plain"):
        return None
    sums = dict.fromkeys(("sum", "count"), 0.0)
    for family in text_string_to_metric_families(reply.text):
        if family.name == "vllm:time_to_first_token_seconds":
            for sample in family.samples:
                kind = sample.name.rpartition("_")[2]
                if kind in sums:
                    sums[kind] += sample.value
    return (sums["sum"], sums["count"]) if sums["count"] else None


def _table(rounds: Mapping[tuple[str, str], list[Figures]]) -> str:
    rows = []
    for (server, tool), mine in rounds.items():
        cells = [f"{server}, {tool}"]
        for name in NAMES:
            value, share = median(mine, name), ratio(mine, rounds[server, BENCH], name)
            if name == "agreement" or tool == BENCH:
                share = None
            cell = "" if value is None else f"{value:.{2 if name == 'agreement' else 1}f}"
            cells.append(cell if share is None else f"{cell} ({share:.2f})")
        rows.append(cells)
    return markdown(HEADINGS, rows)


def _ceiling() -> str:
    rows = []
    with _static(first_ms=1, between_ms=1) as (url, _):
        for concurrency in CEILING_CONCURRENCY:
            run = _bench(
                f"--url={url}",
                f"--max-concurrency={concurrency}",
                f"--num-prompts={4 * concurrency}",
                "--output-len=500",
            )
            rate, cpu = run["output_throughput"], run["client_cpu"]
            rows.append([str(concurrency), f"{rate:.0f}", f"{cpu:.0%}", f"{rate / cpu:.0f}"])
    return markdown(CEILING_HEADINGS, rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--aiperf", help="the program")
    parser.add_argument("--guidellm", help="the program")
    parser.add_argument("--llama-server", metavar="PROGRAM:MODEL", help="llama.cpp's server and a GGUF file")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every round to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
