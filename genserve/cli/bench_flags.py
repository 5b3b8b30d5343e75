"""Bench flags: the options of `genserve bench`, mostly by the names of `vllm bench serve`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import typer

from genserve.cli.help_text import HelpCommand

if TYPE_CHECKING:
    from genserve.bench.arrivals import RampUp

_SERVER, _LOAD, _PROMPTS, _REPORT = "Server", "Load", "Prompts", "Report"
_LIMIT = re.compile(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)")

ServedModel = Annotated[
    str | None, typer.Argument(envvar="GENSERVE_MODEL", help="Default: the only model of the server.")
]
ServerUrl = Annotated[
    str,
    typer.Option(
        "--url",
        "--base-url",
        envvar="GENSERVE_BASE_URL",
        help="URL of the server; the key is GENSERVE_API_KEY.",
        rich_help_panel=_SERVER,
    ),
]
Backend = Annotated[
    Literal["openai-chat", "openai", "tgi", "kserve-generate", "kserve-infer"],
    typer.Option(
        "--backend",
        "--endpoint-type",
        help="OpenAI's chats or completions, TGI's /generate_stream, KServe's generate_stream or infer.",
        rich_help_panel=_SERVER,
    ),
]
EndpointPath = Annotated[
    str,
    typer.Option("--endpoint", metavar="PATH", help="Another path of the endpoint.", rich_help_panel=_SERVER),
]
Header = Annotated[
    list[str],
    typer.Option(metavar="NAME=VALUE", help="Header of every request; repeatable.", rich_help_panel=_SERVER),
]
Ca = Annotated[
    Path | None,
    typer.Option(help="Certificate of the authority that signed the server's.", rich_help_panel=_SERVER),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Do not verify the certificate.", rich_help_panel=_SERVER)
]
ExtraBody = Annotated[
    str,
    typer.Option(
        metavar="JSON", help="More fields of every body; null removes one.", rich_help_panel=_SERVER
    ),
]
Temperature = Annotated[
    float, typer.Option(min=0, help="0: always the likeliest token.", rich_help_panel=_SERVER)
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--no-ignore-eos",
        help="Answers of full length. Default: with random prompts.",
        rich_help_panel=_SERVER,
    ),
]
MaxConcurrency = Annotated[
    list[int] | None,
    typer.Option(
        "--max-concurrency",
        "--concurrency",
        min=1,
        help="Requests at once; repeatable. Default: 1, 8 and 32, or no limit with a request rate.",
        rich_help_panel=_LOAD,
    ),
]
RequestRate = Annotated[
    list[str],
    typer.Option(
        metavar="RATE",
        help="Requests per second, or inf: as fast as the concurrency allows; repeatable.",
        rich_help_panel=_LOAD,
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        min=0.001,
        help="Shape of the gamma distribution of the intervals: 1 is Poisson, less is burstier.",
        rich_help_panel=_LOAD,
    ),
]
RampUpStrategy = Annotated[
    Literal["linear", "exponential"] | None,
    typer.Option(help="Change the rate from the first request to the last.", rich_help_panel=_LOAD),
]
RampUpStart = Annotated[
    float | None,
    typer.Option("--ramp-up-start-rps", min=0.001, help="Rate at the start.", rich_help_panel=_LOAD),
]
RampUpEnd = Annotated[
    float | None,
    typer.Option("--ramp-up-end-rps", min=0.001, help="Rate at the end.", rich_help_panel=_LOAD),
]
NumPrompts = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Requests. Default: all of the file, 4 for each one at once, or 100 at a rate.",
        rich_help_panel=_LOAD,
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(min=0.1, help="End after these seconds, in the middle of answers.", rich_help_panel=_LOAD),
]
NumWarmups = Annotated[
    int, typer.Option(min=0, help="Requests before the measurement.", rich_help_panel=_LOAD)
]
Timeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds until a request has failed.", rich_help_panel=_LOAD)
]
RetryRejected = Annotated[
    bool,
    typer.Option(
        "--retry-rejected",
        help="After a 429 or 503, repeat the request when the server says.",
        rich_help_panel=_LOAD,
    ),
]
DatasetPath = Annotated[
    Path | None,
    typer.Option(
        help="Prompts: a line each; .jsonl: JSON lines; .json: ShareGPT. Default: random words.",
        rich_help_panel=_PROMPTS,
    ),
]
InputLen = Annotated[
    int,
    typer.Option(
        "--input-len", "--random-input-len", min=1, help="Tokens of a prompt.", rich_help_panel=_PROMPTS
    ),
]
OutputLen = Annotated[
    int | None,
    typer.Option(
        "--output-len",
        "--random-output-len",
        min=1,
        help="Tokens of an answer. Default: 128, or as the file says.",
        rich_help_panel=_PROMPTS,
    ),
]
RangeRatio = Annotated[
    float,
    typer.Option(
        "--random-range-ratio",
        min=0,
        max=0.99,
        help="Draw lengths from LENGTH * (1 +- RATIO).",
        rich_help_panel=_PROMPTS,
    ),
]
PrefixLen = Annotated[
    int,
    typer.Option(
        "--random-prefix-len",
        min=0,
        help="Tokens at the beginning that all prompts share.",
        rich_help_panel=_PROMPTS,
    ),
]
CountingTokenizer = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="Counts the tokens of prompts: a tokenizer.json; server: its /tokenize; none: a word each.",
        rich_help_panel=_PROMPTS,
    ),
]
PromptSeed = Annotated[
    int | None,
    typer.Option(
        help="Seed of prompts and intervals. Default: random, so the prefix cache has none.",
        rich_help_panel=_PROMPTS,
    ),
]
Goodput = Annotated[
    list[str],
    typer.Option(
        metavar="NAME:MS ...",
        help="Count requests within these times: ttft:200 tpot:50 e2el:5000.",
        rich_help_panel=_REPORT,
    ),
]
Percentiles = Annotated[
    str,
    typer.Option(
        "--percentiles",
        "--metric-percentiles",
        metavar="RANK,RANK",
        help="Percentiles of the latencies.",
        rich_help_panel=_REPORT,
    ),
]
Output = Annotated[Path | None, typer.Option(help="Write the JSON to this file.", rich_help_panel=_REPORT)]
Plot = Annotated[
    Path | None,
    typer.Option(help="Plot the figures to this .png, .svg or .pdf.", rich_help_panel=_REPORT),
]
SaveDetailed = Annotated[
    bool,
    typer.Option("--save-detailed", help="Add the times of each request to it.", rich_help_panel=_REPORT),
]


class BenchCommand(HelpCommand):
    """A command whose `--goodput ttft:200 tpot:50` takes all the limits that follow, as vLLM's does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat `--goodput` before each of its limits, and parse."""
        return super().parse_args(ctx, list(_with_repeated_goodput(args)))


def _with_repeated_goodput(words: Iterable[str]) -> Iterator[str]:
    previous, limits_follow = "", False
    for word in words:
        if limits_follow and previous != "--goodput" and _LIMIT.fullmatch(word):
            yield "--goodput"
        limits_follow = word == "--goodput" or (limits_follow and bool(_LIMIT.fullmatch(word)))
        yield word
        previous = word


def read_url(url: str) -> str:
    """Return the URL of a server without a trailing slash; raises BadParameter."""
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise typer.BadParameter(f"{url!r} is not http://HOST:PORT or https://HOST:PORT", param_hint="--url")
    return url.rstrip("/").removesuffix("/v1")


def read_headers(headers: Iterable[str]) -> dict[str, str]:
    """Return headers by name; raises BadParameter."""
    pairs = [header.partition("=") for header in headers]
    for name, equals, value in pairs:
        if not (name and equals and f"{name}{value}".isascii() and value.isprintable()):
            raise typer.BadParameter(f"{name!r} is not NAME=VALUE", param_hint="--header")
    return {name: value for name, _, value in pairs}


def read_extra_body(text: str) -> dict[str, Any]:
    """Return the additional fields of a body; raises BadParameter."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not JSON: {error}", param_hint="--extra-body") from None
    if not isinstance(fields, dict):
        raise typer.BadParameter(f"{text!r} is not an object", param_hint="--extra-body")
    return fields


def read_rates(
    rates: Sequence[str],
    *,
    strategy: Literal["linear", "exponential"] | None,
    start_rps: float | None,
    end_rps: float | None,
) -> list[float | RampUp]:
    """Return request rates, or the one that changes; raises BadParameter."""
    from genserve.bench.arrivals import RampUp

    if strategy is None and start_rps is None and end_rps is None:
        return [_number(rate, minimum=0, flag="--request-rate") for rate in rates]
    if strategy is None or start_rps is None or end_rps is None or list(rates) != ["inf"]:
        raise typer.BadParameter(
            "it needs --ramp-up-start-rps and --ramp-up-end-rps, and no --request-rate",
            param_hint="--ramp-up-strategy",
        )
    return [RampUp(strategy=strategy, start_rps=start_rps, end_rps=end_rps)]


def read_percentiles(text: str) -> list[float]:
    """Return the percentiles of a list such as 50,90,99; raises BadParameter."""
    ranks = [_number(rank, minimum=-1, flag="--percentiles") for rank in text.split(",")]
    if not all(0 <= rank <= 100 for rank in ranks):
        raise typer.BadParameter(f"{text!r} has a number beyond 0 to 100", param_hint="--percentiles")
    return ranks


def _number(text: str, *, minimum: float, flag: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not number > minimum:
        raise typer.BadParameter(f"{text!r} is not a number above {minimum:g}", param_hint=flag)
    return number


def read_goodput(limits: Iterable[str]) -> Mapping[str, float]:
    """Return the limits of the goodput in milliseconds, by name; raises BadParameter."""
    found = {}
    for limit in " ".join(limits).split():
        matched = _LIMIT.fullmatch(limit)
        if matched is None:
            raise typer.BadParameter(f"{limit!r} is not ttft:MS, tpot:MS or e2el:MS", param_hint="--goodput")
        found[matched[1]] = float(matched[2])
    return found
