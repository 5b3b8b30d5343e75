"""Bench flags: the options of `genserve bench`, mostly by the names of `vllm bench serve`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import typer

from genserve.cli.flags import Json
from genserve.cli.help_text import HelpCommand
from genserve.client_credentials import bearer

if TYPE_CHECKING:
    from genserve.bench.load_plan import RampUp

_server_option = partial(typer.Option, rich_help_panel="Server")
_load_option = partial(typer.Option, rich_help_panel="Load")
_prompt_option = partial(typer.Option, rich_help_panel="Prompts")
_report_option = partial(typer.Option, rich_help_panel="Report")
_LIMIT = re.compile(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags:
    """The options of `genserve bench`."""

    model: Annotated[
        str | None, typer.Argument(envvar="GENSERVE_MODEL", help="Default: the only model of the server.")
    ] = None
    url: Annotated[
        str,
        _server_option(
            "--url",
            "--base-url",
            envvar="GENSERVE_BASE_URL",
            help="URL of the server; the key is GENSERVE_API_KEY.",
        ),
    ] = "http://127.0.0.1:8000"
    backend: Annotated[
        Literal["openai-chat", "openai", "tgi", "kserve-generate", "kserve-infer"],
        _server_option(
            "--backend",
            "--endpoint-type",
            help="OpenAI's chats or completions, TGI's /generate_stream, KServe's generate_stream or infer.",
        ),
    ] = "openai-chat"
    endpoint: Annotated[
        str, _server_option("--endpoint", metavar="PATH", help="Another path of the endpoint.")
    ] = ""
    header: Annotated[
        list[str], _server_option(metavar="NAME=VALUE", help="Header of every request; repeatable.")
    ] = field(default_factory=list)
    ca: Annotated[
        Path | None, _server_option(help="Certificate of the authority that signed the server's.")
    ] = None
    insecure: Annotated[bool, _server_option("--insecure", help="Do not verify the certificate.")] = False
    extra_body: Annotated[
        str, _server_option(metavar="JSON", help="More fields of every body; null removes one.")
    ] = "{}"
    temperature: Annotated[float, _server_option(min=0, help="0: always the likeliest token.")] = 0.0
    ignore_eos: Annotated[
        bool | None,
        _server_option(
            "--ignore-eos/--no-ignore-eos", help="Answers of full length. Default: with random prompts."
        ),
    ] = None
    max_concurrency: Annotated[
        list[int] | None,
        _load_option(
            "--max-concurrency",
            "--concurrency",
            min=1,
            help="Requests at once; repeatable. Default: 1, 8 and 32, or no limit with a request rate.",
        ),
    ] = None
    request_rate: Annotated[
        list[str],
        _load_option(
            metavar="RATE", help="Requests per second, or inf: as fast as the concurrency allows; repeatable."
        ),
    ] = field(default_factory=lambda: ["inf"])
    burstiness: Annotated[
        float,
        _load_option(
            min=0.001,
            help="Shape of the gamma distribution of the intervals: 1 is Poisson, less is burstier.",
        ),
    ] = 1.0
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None,
        _load_option(help="Change the rate from the first request to the last."),
    ] = None
    ramp_up_start: Annotated[
        float | None, _load_option("--ramp-up-start-rps", min=0.001, help="Rate at the start.")
    ] = None
    ramp_up_end: Annotated[
        float | None, _load_option("--ramp-up-end-rps", min=0.001, help="Rate at the end.")
    ] = None
    num_prompts: Annotated[
        int | None,
        _load_option(
            min=1, help="Requests. Default: all of the file, 4 for each one at once, or 100 at a rate."
        ),
    ] = None
    duration: Annotated[
        float | None, _load_option(min=0.1, help="End after these seconds, in the middle of answers.")
    ] = None
    num_warmups: Annotated[int, _load_option(min=0, help="Requests before the measurement.")] = 1
    timeout: Annotated[float, _load_option(min=0.1, help="Seconds until a request has failed.")] = 600.0
    retry_rejected: Annotated[
        bool,
        _load_option("--retry-rejected", help="After a 429 or 503, repeat the request when the server says."),
    ] = False
    dataset_path: Annotated[
        Path | None,
        _prompt_option(
            help="Prompts: a line each; .jsonl: JSON lines; .json: ShareGPT. Default: random words."
        ),
    ] = None
    input_len: Annotated[
        int, _prompt_option("--input-len", "--random-input-len", min=1, help="Tokens of a prompt.")
    ] = 40
    output_len: Annotated[
        int | None,
        _prompt_option(
            "--output-len",
            "--random-output-len",
            min=1,
            help="Tokens of an answer. Default: 128, or as the file says.",
        ),
    ] = None
    range_ratio: Annotated[
        float,
        _prompt_option(
            "--random-range-ratio", min=0, max=0.99, help="Draw lengths from LENGTH * (1 +- RATIO)."
        ),
    ] = 0.0
    prefix_len: Annotated[
        int,
        _prompt_option("--random-prefix-len", min=0, help="Tokens at the beginning that all prompts share."),
    ] = 0
    tokenizer: Annotated[
        str,
        _prompt_option(
            metavar="PATH",
            help="Counts the tokens of prompts: a tokenizer.json; server: its /tokenize; none: a word each.",
        ),
    ] = "server"
    seed: Annotated[
        int | None,
        _prompt_option(help="Seed of prompts and intervals. Default: random, so the prefix cache has none."),
    ] = None
    goodput: Annotated[
        list[str],
        _report_option(
            metavar="NAME:MS ...", help="Count requests within these times: ttft:200 tpot:50 e2el:5000."
        ),
    ] = field(default_factory=list)
    percentiles: Annotated[
        str,
        _report_option(
            "--percentiles", "--metric-percentiles", metavar="RANK,RANK", help="Percentiles of the latencies."
        ),
    ] = "50,90,99"
    json_: Json = False
    output: Annotated[Path | None, _report_option(help="Write the JSON to this file.")] = None
    plot: Annotated[Path | None, _report_option(help="Plot the figures to this .png, .svg or .pdf.")] = None
    save_detailed: Annotated[
        bool, _report_option("--save-detailed", help="Add the times of each request to it.")
    ] = False

    def headers(self) -> dict[str, str]:
        """Return the headers by name, with that of the key in GENSERVE_API_KEY; raises BadParameter."""
        pairs = [header.partition("=") for header in self.header]
        for name, equals, value in pairs:
            if not (name and equals and f"{name}{value}".isascii() and value.isprintable()):
                raise typer.BadParameter(f"{name!r} is not NAME=VALUE", param_hint="--header")
        key = os.environ.get("GENSERVE_API_KEY")
        return ({"authorization": bearer(key)} if key else {}) | {name: value for name, _, value in pairs}

    def base_url(self) -> str:
        """Return the URL of the server without a trailing slash; raises BadParameter."""
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise typer.BadParameter(
                f"{self.url!r} is not http://HOST:PORT or https://HOST:PORT", param_hint="--url"
            )
        return self.url.rstrip("/").removesuffix("/v1")

    def body_fields(self) -> dict[str, Any]:
        """Return the additional fields of a body; raises BadParameter."""
        try:
            fields = json.loads(self.extra_body)
        except ValueError as error:
            raise typer.BadParameter(
                f"{self.extra_body!r} is not JSON: {error}", param_hint="--extra-body"
            ) from None
        if not isinstance(fields, dict):
            raise typer.BadParameter(f"{self.extra_body!r} is not an object", param_hint="--extra-body")
        return fields

    def rates(self) -> list[float | RampUp]:
        """Return the request rates, or the one that changes; raises BadParameter."""
        from genserve.bench.load_plan import RampUp

        strategy, start_rps, end_rps = self.ramp_up_strategy, self.ramp_up_start, self.ramp_up_end
        if strategy is None and start_rps is None and end_rps is None:
            return [_number(rate, minimum=0, flag="--request-rate") for rate in self.request_rate]
        if strategy is None or start_rps is None or end_rps is None or self.request_rate != ["inf"]:
            raise typer.BadParameter(
                "it needs --ramp-up-start-rps and --ramp-up-end-rps, and no --request-rate",
                param_hint="--ramp-up-strategy",
            )
        return [RampUp(strategy=strategy, start_rps=start_rps, end_rps=end_rps)]

    def ranks(self) -> list[float]:
        """Return the percentiles to show; raises BadParameter."""
        ranks = [_number(rank, minimum=-1, flag="--percentiles") for rank in self.percentiles.split(",")]
        if not all(0 <= rank <= 100 for rank in ranks):
            raise typer.BadParameter(
                f"{self.percentiles!r} has a number beyond 0 to 100", param_hint="--percentiles"
            )
        return ranks

    def goodput_limits_ms(self) -> Mapping[str, float]:
        """Return the limits of the goodput in milliseconds, by name; raises BadParameter."""
        found = {}
        for limit in " ".join(self.goodput).split():
            matched = _LIMIT.fullmatch(limit)
            if matched is None:
                raise typer.BadParameter(
                    f"{limit!r} is not ttft:MS, tpot:MS or e2el:MS", param_hint="--goodput"
                )
            found[matched[1]] = float(matched[2])
        return found


def _number(text: str, *, minimum: float, flag: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not number > minimum:
        raise typer.BadParameter(f"{text!r} is not a number above {minimum:g}", param_hint=flag)
    return number


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
