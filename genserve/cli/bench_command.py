"""The command `genserve bench`."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from genserve.cli import bench_flags as flags
from genserve.cli.flags import Json

if TYPE_CHECKING:
    import httpx2

    from genserve.bench.token_counters import TokenCounter


_LIST_TIMEOUT_S = 30.0


def bench(
    model: flags.ServedModel = None,
    url: flags.ServerUrl = "http://127.0.0.1:8000",
    backend: flags.Backend = "openai-chat",
    endpoint: flags.EndpointPath = "",
    header: flags.Header = [],  # noqa: B006  # typer copies it
    ca: flags.Ca = None,
    insecure: flags.Insecure = False,
    extra_body: flags.ExtraBody = "{}",
    temperature: flags.Temperature = 0.0,
    ignore_eos: flags.IgnoreEos = None,
    max_concurrency: flags.MaxConcurrency = None,
    request_rate: flags.RequestRate = ["inf"],  # noqa: B006
    burstiness: flags.Burstiness = 1.0,
    ramp_up_strategy: flags.RampUpStrategy = None,
    ramp_up_start: flags.RampUpStart = None,
    ramp_up_end: flags.RampUpEnd = None,
    num_prompts: flags.NumPrompts = None,
    duration: flags.Duration = None,
    num_warmups: flags.NumWarmups = 1,
    timeout: flags.Timeout = 600.0,
    retry_rejected: flags.RetryRejected = False,
    dataset_path: flags.DatasetPath = None,
    input_len: flags.InputLen = 40,
    output_len: flags.OutputLen = None,
    range_ratio: flags.RangeRatio = 0.0,
    prefix_len: flags.PrefixLen = 0,
    tokenizer: flags.CountingTokenizer = "server",
    seed: flags.PromptSeed = None,
    goodput: flags.Goodput = [],  # noqa: B006
    percentiles: flags.Percentiles = "50,90,99",
    json: Json = False,
    output: flags.Output = None,
    plot: flags.Plot = None,
    save_detailed: flags.SaveDetailed = False,
) -> None:
    """Measure a running server with streaming requests: tokens per second, latencies and errors.

    Each concurrency and request rate is a load of its own. On the server's machine, the client competes with
    it for the cores. Ctrl-C ends the measurement and shows the results so far.
    """
    import httpx2

    from genserve.bench.datasets import DEFAULT_OUTPUT_LEN, RandomLengths, random_dataset, read_dataset
    from genserve.bench.dialects import DIALECTS, Requested, check_prompts
    from genserve.bench.endpoint import Target, tls_context
    from genserve.cli.bench_plans import make_plans
    from genserve.cli.bench_report import Report
    from genserve.cli.bench_runs import Pace, run_plans, warm_up
    from genserve.figure_file import check_folder, check_plot

    ranks, limits_ms = flags.read_percentiles(percentiles), flags.read_goodput(goodput)
    rates = flags.read_rates(
        request_rate, strategy=ramp_up_strategy, start_rps=ramp_up_start, end_rps=ramp_up_end
    )
    fields = flags.read_extra_body(extra_body)
    if plot is not None:
        check_plot(plot)
    if output is not None:
        check_folder(output, of="results")
    base_url, headers = flags.read_url(url), _headers(header)
    tls = tls_context(base_url, ca=ca, insecure=insecure)
    seed = random.getrandbits(32) if seed is None else seed
    with httpx2.Client(
        base_url=base_url, headers=headers, verify=tls or False, timeout=_LIST_TIMEOUT_S, trust_env=False
    ) as http:
        name = _served_model(http) if model is None else model
        lengths = RandomLengths(
            input_len=input_len,
            output_len=output_len or DEFAULT_OUTPUT_LEN,
            prefix_len=prefix_len,
            range_ratio=range_ratio,
        )
        counter = _counter(tokenizer, http=http, model=name)
        if dataset_path is None:
            prompts, num_in_file = random_dataset(lengths, seed=seed, counter=counter), None
        else:
            from_file = read_dataset(dataset_path, output_len=output_len, counter=counter)
            check_prompts(from_file, backend=backend)
            prompts, num_in_file = itertools.cycle(from_file), len(from_file)
    target = Target(
        base_url=base_url,
        dialect=DIALECTS[backend],
        requested=Requested(
            model=name,
            temperature=temperature,
            ignore_eos=dataset_path is None if ignore_eos is None else ignore_eos,
        ),
        endpoint=endpoint,
        headers=headers,
        extra_body=fields,
        tls=tls,
    )
    if num_warmups:
        warm_up(target, prompts, num_requests=num_warmups, timeout_s=timeout)
    plans = make_plans(
        rates=rates,
        concurrencies=max_concurrency,
        num_prompts=num_prompts or num_in_file,
        duration_s=duration,
    )
    pace = Pace(
        burstiness=burstiness,
        seed=seed,
        duration_s=duration,
        timeout_s=timeout,
        retry_rejected=retry_rejected,
    )
    report = Report(
        {"url": target.url, "backend": backend, "model": name, "seed": seed, "burstiness": burstiness},
        ranks=ranks,
        limits_ms=limits_ms,
        is_quiet=json,
        is_detailed=save_detailed,
    )
    is_interrupted = run_plans(plans, target, prompts, pace=pace, report=report)
    report.end(output, plot, is_interrupted=is_interrupted)
    if is_interrupted or not report.has_completed:
        raise typer.Exit(130 if is_interrupted else 1)


def _headers(assignments: list[str]) -> dict[str, str]:
    from genserve.api_key import bearer

    key = os.environ.get("GENSERVE_API_KEY")
    return ({"authorization": bearer(key)} if key else {}) | flags.read_headers(assignments)


def _served_model(http: httpx2.Client) -> str:
    """Return the name of the only model of a server; a server that lists none has one without a name."""
    from genserve.bench.model_names import served_models
    from genserve.cli.model_access import choose_remote

    known = served_models(http)
    return choose_remote(None, known) if known else ""


def _counter(tokenizer: str, *, http: httpx2.Client, model: str) -> TokenCounter | None:
    """Return what counts the tokens of prompts; None: words are counted."""
    from genserve.bench.token_counters import local_counter, server_counter

    match tokenizer:
        case "none":
            return None
        case "server":
            return server_counter(http, model=model)
        case path:
            return local_counter(Path(path))
