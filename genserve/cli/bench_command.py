"""The command `genserve bench`."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genserve.cli.bench_flags import BenchFlags
from genserve.errors import InvalidRequest, Unauthenticated, Unreachable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx2

    from genserve.bench.datasets import BenchPrompt, TokenCounter
    from genserve.bench.load_generator import Target

_LIST_TIMEOUT_S = 30.0


def bench(flags: BenchFlags) -> None:
    """Measure a running server with streaming requests: tokens per second, latencies and errors.

    Each concurrency and request rate is a load of its own. On the server's machine, the client competes with
    it for the cores. Ctrl-C ends the measurement and shows the results so far.
    """
    from genserve.bench.load_generator import Load
    from genserve.bench.load_plan import make_plans
    from genserve.cli.bench_report import Report, run_plans, warm_up
    from genserve.cli.plots import check_folder, check_plot

    ranks, limits_ms, rates = flags.ranks(), flags.goodput_limits_ms(), flags.rates()
    if flags.plot is not None:
        check_plot(flags.plot)
    if flags.output is not None:
        check_folder(flags.output, of="results")
    seed = random.getrandbits(32) if flags.seed is None else flags.seed
    target, prompts, num_in_file = _target_and_prompts(flags, seed=seed)
    if flags.num_warmups:
        warm_up(target, prompts, num_requests=flags.num_warmups, timeout_s=flags.timeout)
    plans = make_plans(
        rates=rates,
        concurrencies=flags.max_concurrency,
        num_prompts=flags.num_prompts or num_in_file,
        duration_s=flags.duration,
    )
    load = Load(
        prompts=prompts,
        duration_s=flags.duration,
        timeout_s=flags.timeout,
        retry_rejected=flags.retry_rejected,
    )
    settings = {"url": target.url, "backend": flags.backend, "model": target.requested.model}
    report = Report(
        settings | {"seed": seed, "burstiness": flags.burstiness},
        ranks=ranks,
        limits_ms=limits_ms,
        is_quiet=flags.json_,
        is_detailed=flags.save_detailed,
    )
    is_interrupted = run_plans(
        plans, load, target, burstiness=flags.burstiness, seed=seed, report=report
    )
    report.end(flags.output, flags.plot, is_interrupted=is_interrupted)
    if is_interrupted or not report.has_completed:
        raise SystemExit(130 if is_interrupted else 1)


def _target_and_prompts(flags: BenchFlags, *, seed: int) -> tuple[Target, Iterator[BenchPrompt], int | None]:
    """Return the target, endless prompts, and the number of prompts in the file, if there is a file.

    Unless flags name a model and a tokenizer, the server lists its only model and counts tokens.
    """
    import httpx2

    from genserve.bench.dialects import DIALECTS, Requested
    from genserve.bench.load_generator import Target
    from genserve.client_credentials import tls_context

    base_url, headers, extra_body = flags.base_url(), flags.headers(), flags.body_fields()
    tls = tls_context(ca=flags.ca, insecure=flags.insecure) if base_url.startswith("https://") else None
    with httpx2.Client(
        base_url=base_url, headers=headers, verify=tls or False, timeout=_LIST_TIMEOUT_S, trust_env=False
    ) as http:
        model = _served_model(http) if flags.model is None else flags.model
        counter = _counter(flags.tokenizer, http=http, model=model)
        prompts, num_in_file = _prompts(flags, seed=seed, counter=counter)
    ignore_eos = flags.dataset_path is None if flags.ignore_eos is None else flags.ignore_eos
    target = Target(
        base_url=base_url,
        dialect=DIALECTS[flags.backend],
        requested=Requested(model=model, temperature=flags.temperature, ignore_eos=ignore_eos),
        endpoint=flags.endpoint,
        headers=headers,
        extra_body=extra_body,
        tls=tls,
    )
    return target, prompts, num_in_file


def _prompts(
    flags: BenchFlags, *, seed: int, counter: TokenCounter | None
) -> tuple[Iterator[BenchPrompt], int | None]:
    from genserve.bench.datasets import DEFAULT_OUTPUT_LEN, RandomLengths, random_dataset, read_dataset
    from genserve.bench.dialects import check_prompts

    if flags.dataset_path is None:
        lengths = RandomLengths(
            input_len=flags.input_len,
            output_len=flags.output_len or DEFAULT_OUTPUT_LEN,
            prefix_len=flags.prefix_len,
            range_ratio=flags.range_ratio,
        )
        return random_dataset(lengths, seed=seed, counter=counter), None
    from_file = read_dataset(flags.dataset_path, output_len=flags.output_len, counter=counter)
    check_prompts(from_file, backend=flags.backend)
    return itertools.cycle(from_file), len(from_file)


def _served_model(http: httpx2.Client) -> str:
    """Return the name of a server's only model; the model of a server without a list has no name."""
    from genserve.cli.model_choice import choose_remote

    # TGI has no list of models, and its model has no name.
    known = _listed_models(http, "GET", "/v1/models") or _listed_models(http, "POST", "/v2/repository/index")
    return choose_remote(None, known) if known else ""


def _listed_models(http: httpx2.Client, method: str, path: str) -> list[str]:
    """Return the names in a server's list of models; empty if the server has no such list.

    Raises:
        Unreachable: the server does not answer.
        Unauthenticated: the server rejects the key.
        InvalidRequest: the answer is no list of models.
    """
    import httpx2

    from genserve.client_credentials import tls_failure

    try:
        reply = http.request(method, path)
    except httpx2.HTTPError as error:
        raise tls_failure(error, url=str(http.base_url)) or Unreachable(
            f"no server answers at {http.base_url}: {error}",
            remedy="start one with `genserve serve`, or set --url",
        ) from error
    if reply.status_code in (401, 403):
        raise Unauthenticated(
            f"the server at {http.base_url} rejects the key", remedy="set GENSERVE_API_KEY, or --header"
        )
    if not reply.is_success:
        return []
    try:
        return _names(reply.json())
    except (ValueError, TypeError, KeyError):
        raise InvalidRequest(f"{http.base_url}{path} does not list models", field="url") from None


def _names(document: Any) -> list[str]:
    entries = document["data"] if isinstance(document, dict) else document
    return [
        str(entry["id"] if "id" in entry else entry["name"])
        for entry in entries
        if "completion" in entry.get("capabilities", ("completion",))
    ]


def _counter(tokenizer: str, *, http: httpx2.Client, model: str) -> TokenCounter | None:
    """Return the counter of prompt tokens; None: words are counted."""
    from genserve.bench.datasets import local_counter, server_counter

    match tokenizer:
        case "none":
            return None
        case "server":
            return server_counter(http, model=model)
        case path:
            return local_counter(Path(path))
