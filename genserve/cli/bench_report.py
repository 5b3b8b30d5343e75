"""Bench report: runs the loads of `genserve bench`, and prints their progress and figures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from rich.table import Table

from genserve.bench.answers import LoadResult
from genserve.bench.datasets import BenchPrompt
from genserve.bench.load_generator import Load, Target, run_load
from genserve.bench.load_plan import LoadPlan
from genserve.bench.summary import TIME_LABELS, Distribution, Summary, inter_token_latencies_s, summarise
from genserve.cli.console import counted, make_console, print_json, print_table
from genserve.cli.plots import ChartedLoad, draw_loads
from genserve.errors import InvalidRequest, Unreachable
from genserve.version import __version__

_BUSY = 0.9         # share of a core; above it, the load generator may be the bottleneck


def warm_up(
    target: Target, prompts: Iterator[BenchPrompt], *, num_requests: int, timeout_s: float
) -> None:
    """Send some requests one after the other, since a server's first answers are slower.

    Raises:
        Unreachable: no server answers.
        InvalidRequest: the server rejects all requests, or its answers do not follow the dialect.
    """
    result = LoadResult()
    arrivals_s = itertools.repeat(0.0, num_requests)
    load = Load(prompts=prompts, arrivals_s=arrivals_s, max_concurrency=1, timeout_s=timeout_s)
    with ProgressLine("warm-up", result, total=num_requests) as line:
        run_load(load, target, result, on_tick=line.show)
    failures = result.failures()
    if len(failures) < num_requests or not failures:
        return
    [failure, *_] = failures
    if failure.kind == "tls":
        raise Unreachable(failure.message)
    if failure.kind in ("connection", "timeout"):
        raise Unreachable(
            f"no server answers at {target.url}: {failure.message}",
            remedy="start one with `genserve serve`, or set --url",
        )
    raise InvalidRequest(
        f"{target.url} failed with {failure.kind}: {failure.message}",
        remedy="see the model, --backend, --endpoint, --extra-body and GENSERVE_API_KEY",
    )


def run_plans(
    plans: Sequence[LoadPlan], load: Load, target: Target, *, burstiness: float, seed: int, report: Report
) -> bool:
    """Measure the loads, and report each when it ends; return whether Ctrl-C ended the last load.

    Args:
        plans: the loads.
        load: the prompts and limits of all loads. Prompts are endless; each request uses the next one.
        target: the server to send requests to.
        burstiness: how irregular the arrivals of an open loop are, see `arrival_times`.
        seed: seeds the arrivals of an open loop.
        report: receives the results.
    """
    for number, plan in enumerate(plans):
        result = LoadResult()
        arrivals_s = plan.arrivals_s(burstiness=burstiness, seed=[seed, number])
        planned = replace(load, arrivals_s=arrivals_s, max_concurrency=plan.concurrency)
        try:
            with ProgressLine(plan.title, result, total=plan.num_prompts) as line:
                run_load(planned, target, result, on_tick=line.show)
        except KeyboardInterrupt:
            report.add(plan, result)
            return True
        report.add(plan, result)
    return False


class ProgressLine:
    """A context manager that shows a load's progress on one line of a terminal; elsewhere only its title."""

    def __init__(self, title: str, result: LoadResult, *, total: int | None) -> None:
        self._console = make_console(stderr=True)
        self._title = title
        self._result = result
        self._total = total

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._write(self._title)
        else:
            self._console.print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._write("")
            self._write("\r")

    def show(self) -> None:
        """Write the line over the previous one."""
        if not self._console.is_terminal:
            return
        answers, failed = self._result.answers, len(self._result.failures())
        done = len(self._result.complete()) + failed
        tokens = sum(answer.num_tokens for answer in answers)
        elapsed_s = time.perf_counter() - self._result.started_s
        total = f"/{self._total}" if self._total else ""
        self._write(
            f"{self._title}: {done}{total} done, {len(answers) - done} running, {failed} failed, "
            f"{tokens / elapsed_s:.0f} tokens/s"
        )

    def _write(self, text: str) -> None:
        # Leave out the terminal's last column, where the cursor would wrap.
        width = self._console.width - 1
        self._console.file.write(text if text == "\r" else f"\r{text[:width].ljust(width)}")
        self._console.file.flush()


class Report:
    """Prints the figures of each load when it ends, and writes all figures as JSON and as a plot."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        ranks: Sequence[float],
        limits_ms: Mapping[str, float],
        is_quiet: bool,
        is_detailed: bool,
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._limits_ms = limits_ms
        self._is_quiet = is_quiet       # stdout is reserved for the JSON
        self._is_detailed = is_detailed
        self._runs: list[dict[str, Any]] = []
        self._loads: list[ChartedLoad] = []
        self._started = datetime.now(UTC)

    @property
    def has_completed(self) -> bool:
        """Whether any request has a complete answer."""
        return any(load.summary.completed for load in self._loads)

    def add(self, plan: LoadPlan, result: LoadResult) -> None:
        """Add the result of a load."""
        summary = summarise(result, ranks=self._ranks, limits_ms=self._limits_ms)
        self._loads.append(ChartedLoad(label=plan.title, result=result, summary=summary))
        details = _details(result) if self._is_detailed else {}
        self._runs.append(plan.as_json() | summary.as_json() | details)
        if not self._is_quiet:
            print_summary(plan.title, summary, ranks=self._ranks)

    def end(self, output: Path | None, plot: Path | None, *, is_interrupted: bool) -> None:
        """Print all loads in one table, and write the JSON to stdout or a file, and the plot.

        Raises:
            InvalidRequest: a file cannot be written.
        """
        if len(self._loads) > 1 and not self._is_quiet:
            _print_comparison(self._loads, ranks=self._ranks)
        document = {
            "genserve_version": __version__,
            "date": self._started.isoformat(timespec="seconds"),
            **self._settings,
            "goodput_limits_ms": self._limits_ms,
            "is_interrupted": is_interrupted,
            "runs": self._runs,
        }
        if self._is_quiet:
            print_json(document)
        try:
            if output is not None:
                indented = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
                output.write_bytes(orjson.dumps(document, option=indented))
            if plot is not None:
                draw_loads(self._loads, title=f"genserve bench: {self._settings['url']}", path=plot)
        except OSError as error:
            raise InvalidRequest(f"{error.filename} cannot be written: {error.strerror}") from error


def _details(result: LoadResult) -> dict[str, Any]:
    """Return the times of each request in seconds, in the order in which the requests were sent."""
    answers = result.answers
    return {
        "start_times": [answer.sent_s - result.started_s for answer in answers],
        "ttfts": [answer.first_text_s for answer in answers],
        "itls": [inter_token_latencies_s([answer]) for answer in answers],
        "latencies": [answer.latency_s for answer in answers],
        "input_lens": [answer.prompt_tokens for answer in answers],
        "output_lens": [answer.num_tokens for answer in answers],
        "rejections": [answer.rejections_s for answer in answers],
        "is_complete": [answer.is_complete for answer in answers],
        "errors": [answer.failure.message if answer.failure else "" for answer in answers],
    }


def print_summary(title: str, summary: Summary, *, ranks: Sequence[float]) -> None:
    """Print the figures of one load."""
    console = make_console()
    for line in _lines(title, summary):
        console.print(line)
    table = Table(box=None, pad_edge=False)
    table.add_column("ms", no_wrap=True)
    for heading in ("mean", *(f"p{rank:g}" for rank in ranks)):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, label in TIME_LABELS.items():
        times: Distribution | None = getattr(summary, name)
        if times is not None:
            cells = [times.mean, *(times.percentiles[rank] for rank in ranks)]
            table.add_row(label, *(f"{ms:.1f}" for ms in cells))
    if table.row_count:
        print_table(table)
    console.print()


def _print_comparison(loads: Sequence[ChartedLoad], *, ranks: Sequence[float]) -> None:
    table = Table(box=None, pad_edge=False)
    extremes = sorted({min(ranks), max(ranks)})
    times = [(name, rank) for name in ("ttft", "itl") for rank in extremes]
    table.add_column("", no_wrap=True)
    for heading in ("requests/s", "tokens/s", *(f"{name.upper()} p{rank:g} ms" for name, rank in times)):
        table.add_column(heading, justify="right")
    for load in loads:
        cells = [f"{load.summary.request_rate:.2f}", f"{load.summary.output_rate:.1f}"]
        for name, rank in times:
            distribution: Distribution | None = getattr(load.summary, name)
            cells.append("" if distribution is None else f"{distribution.percentiles[rank]:.1f}")
        table.add_row(load.label, *cells)
    print_table(table)


def _lines(title: str, summary: Summary) -> list[str]:
    requests = counted(summary.completed, "request")
    lines = [f"{title}: {requests} in {summary.duration_s:.1f} s{_losses(summary)}"]
    rates = [f"{summary.request_rate:.2f} requests/s"]
    if summary.goodput is not None:
        rates.append(f"{summary.goodput:.2f} of them within the limits")
    if summary.output_tokens:
        rates.append(f"{summary.output_rate:.1f} output tokens/s{_COUNTED[summary.counted_by]}")
    if summary.prompt_tokens:
        rates.append(f"{summary.total_rate:.1f} with those of prompts")
    lines.append("; ".join(rates))
    for kind, (count, message) in summary.errors.items():
        lines.append(f"  {count} x {kind}: {' '.join(message.split())}")
    if summary.client_cpu > _BUSY:
        lines.append(
            f"  the load generator used {summary.client_cpu:.0%} of a core and may limit these figures: "
            "start several"
        )
    return lines


_COUNTED = {
    "server": "",
    "chunks": " (chunks: the server does not count them)",
    "both": " (some by chunks: the server does not count all)",
}


def _losses(summary: Summary) -> str:
    losses = {
        "failed": summary.failed,
        "cut by the end": summary.unfinished,
        "rejections": summary.rejections,
        "without text": summary.without_text,
    }
    return "".join(f", {count} {what}" for what, count in losses.items() if count)
