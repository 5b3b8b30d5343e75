"""Bench flags: the options of `genserve bench`, most of which have the names of `vllm bench serve`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from genserve.cli.flags import JSON_FLAG, TlsFlags, server_flag
from genserve.cli.parser import UsageError
from genserve.client_credentials import bearer
from genserve.settings import Flag, flag

if TYPE_CHECKING:
    from genserve.bench.load_plan import RampUp

_load_flag = partial(Flag, heading="Load")
_prompt_flag = partial(Flag, heading="Prompts")
_report_flag = partial(Flag, heading="Report")
_LIMIT = re.compile(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, kw_only=True)
class BenchFlags(TlsFlags):
    """The options of `genserve bench`."""

    model: str | None = flag(
        None, Flag(help="Default: the only model of the server.", is_argument=True, variable="GENSERVE_MODEL")
    )
    url: str = flag(
        "http://127.0.0.1:8000",
        server_flag(
            help="URL of the server; the key is GENSERVE_API_KEY.",
            names=("--url", "--base-url"),
            variable="GENSERVE_BASE_URL",
        ),
    )
    backend: Literal["openai-chat", "openai", "tgi", "kserve-generate", "kserve-infer"] = flag(
        "openai-chat",
        server_flag(
            help="OpenAI's chats or completions, TGI's /generate_stream, KServe's generate_stream or infer.",
            names=("--backend", "--endpoint-type"),
        ),
    )
    endpoint: str = flag("", server_flag(help="Another path of the endpoint.", metavar="PATH"))
    header: list[str] = flag(
        list, server_flag(help="Header of every request; repeatable.", metavar="NAME=VALUE")
    )
    extra_body: str = flag(
        "{}", server_flag(help="More fields of every body; null removes one.", metavar="JSON")
    )
    temperature: float = flag(0.0, server_flag(help="0: always the likeliest token.", minimum=0))
    ignore_eos: bool | None = flag(
        None, server_flag(help="Answers of full length. Default: with random prompts.")
    )
    max_concurrency: list[int] | None = flag(
        None,
        _load_flag(
            help="Requests at once; repeatable. Default: 1, 8 and 32, or no limit with a request rate.",
            names=("--max-concurrency", "--concurrency"),
            minimum=1,
        ),
    )
    request_rate: list[str] = flag(
        lambda: ["inf"],
        _load_flag(
            help="Requests per second, or inf: as fast as the concurrency allows; repeatable.", metavar="RATE"
        ),
    )
    burstiness: float = flag(
        1.0,
        _load_flag(
            help="Shape of the gamma distribution of the intervals: 1 is Poisson, less is burstier.",
            minimum=0.001,
        ),
    )
    ramp_up_strategy: Literal["linear", "exponential"] | None = flag(
        None, _load_flag(help="Change the rate from the first request to the last.")
    )
    ramp_up_start: float | None = flag(
        None, _load_flag(help="Rate at the start.", names=("--ramp-up-start-rps",), minimum=0.001)
    )
    ramp_up_end: float | None = flag(
        None, _load_flag(help="Rate at the end.", names=("--ramp-up-end-rps",), minimum=0.001)
    )
    num_prompts: int | None = flag(
        None,
        _load_flag(
            help="Requests. Default: all of the file, 4 for each one at once, or 100 at a rate.", minimum=1
        ),
    )
    duration: float | None = flag(
        None, _load_flag(help="End after these seconds, in the middle of answers.", minimum=0.1)
    )
    num_warmups: int = flag(1, _load_flag(help="Requests before the measurement.", minimum=0))
    timeout: float = flag(600.0, _load_flag(help="Seconds until a request has failed.", minimum=0.1))
    retry_rejected: bool = flag(
        False, _load_flag(help="After a 429 or 503, repeat the request when the server says.")
    )
    dataset_path: Path | None = flag(
        None,
        _prompt_flag(
            help="Prompts: a line each; .jsonl: JSON lines; .json: ShareGPT. Default: random words."
        ),
    )
    input_len: int = flag(
        40, _prompt_flag(help="Tokens of a prompt.", names=("--input-len", "--random-input-len"), minimum=1)
    )
    output_len: int | None = flag(
        None,
        _prompt_flag(
            help="Tokens of an answer. Default: 128, or as the file says.",
            names=("--output-len", "--random-output-len"),
            minimum=1,
        ),
    )
    range_ratio: float = flag(
        0.0,
        _prompt_flag(
            help="Draw lengths from LENGTH * (1 +- RATIO).",
            names=("--random-range-ratio",),
            minimum=0,
            maximum=0.99,
        ),
    )
    prefix_len: int = flag(
        0,
        _prompt_flag(
            help="Tokens at the beginning that all prompts share.", names=("--random-prefix-len",), minimum=0
        ),
    )
    tokenizer: str = flag(
        "server",
        _prompt_flag(
            help="Counts the tokens of prompts: a tokenizer.json; server: its /tokenize; none: a word each.",
            metavar="PATH",
        ),
    )
    seed: int | None = flag(
        None,
        _prompt_flag(help="Seed of prompts and intervals. Default: random, so the prefix cache has none."),
    )
    goodput: list[str] = flag(
        list,
        _report_flag(
            help="Count requests within these times: ttft:200 tpot:50 e2el:5000.",
            metavar="NAME:MS ...",
            takes_several=True,
        ),
    )
    percentiles: str = flag(
        "50,90,99",
        _report_flag(
            help="Percentiles of the latencies.",
            names=("--percentiles", "--metric-percentiles"),
            metavar="RANK,RANK",
        ),
    )
    json_: bool = flag(False, JSON_FLAG)
    output: Path | None = flag(None, _report_flag(help="Write the JSON to this file."))
    plot: Path | None = flag(None, _report_flag(help="Plot the figures to this .png, .svg or .pdf."))
    save_detailed: bool = flag(False, _report_flag(help="Add the times of each request to it."))

    def headers(self) -> dict[str, str]:
        """Return the headers by name, with the key in GENSERVE_API_KEY; raises UsageError."""
        pairs = [header.partition("=") for header in self.header]
        for name, equals, value in pairs:
            if not (name and equals and f"{name}{value}".isascii() and value.isprintable()):
                raise UsageError(f"--header: {name!r} is not NAME=VALUE")
        key = os.environ.get("GENSERVE_API_KEY")
        return ({"authorization": bearer(key)} if key else {}) | {name: value for name, _, value in pairs}

    def base_url(self) -> str:
        """Return the URL of the server without a trailing slash; raises UsageError."""
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise UsageError(f"--url: {self.url!r} is not http://HOST:PORT or https://HOST:PORT")
        return self.url.rstrip("/").removesuffix("/v1")

    def body_fields(self) -> dict[str, Any]:
        """Return the additional fields of a body; raises UsageError."""
        try:
            fields = json.loads(self.extra_body)
        except ValueError as error:
            raise UsageError(f"--extra-body: {self.extra_body!r} is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise UsageError(f"--extra-body: {self.extra_body!r} is not an object")
        return fields

    def rates(self) -> list[float | RampUp]:
        """Return the request rates, or the one rate that changes; raises UsageError."""
        from genserve.bench.load_plan import RampUp

        strategy, start_rps, end_rps = self.ramp_up_strategy, self.ramp_up_start, self.ramp_up_end
        if strategy is None and start_rps is None and end_rps is None:
            return [_number(rate, minimum=0, flag="--request-rate") for rate in self.request_rate]
        if strategy is None or start_rps is None or end_rps is None or self.request_rate != ["inf"]:
            raise UsageError(
                "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, and no --request-rate"
            )
        return [RampUp(strategy=strategy, start_rps=start_rps, end_rps=end_rps)]

    def ranks(self) -> list[float]:
        """Return the percentiles to show; raises UsageError."""
        ranks = [_number(rank, minimum=-1, flag="--percentiles") for rank in self.percentiles.split(",")]
        if not all(0 <= rank <= 100 for rank in ranks):
            raise UsageError(f"--percentiles: {self.percentiles!r} has a number beyond 0 to 100")
        return ranks

    def goodput_limits_ms(self) -> Mapping[str, float]:
        """Return the limits of the goodput in milliseconds, by name; raises UsageError."""
        found = {}
        for limit in " ".join(self.goodput).split():
            matched = _LIMIT.fullmatch(limit)
            if matched is None:
                raise UsageError(f"--goodput: {limit!r} is not ttft:MS, tpot:MS or e2el:MS")
            found[matched[1]] = float(matched[2])
        return found


def _number(text: str, *, minimum: float, flag: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not number > minimum:
        raise UsageError(f"{flag}: {text!r} is not a number above {minimum:g}")
    return number
