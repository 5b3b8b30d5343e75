"""The command `genserve bench`."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    from genserve.cli.load_generator import LoadResult


_HEADINGS = ("at once", "tokens/s", "first token, ms: p50", "p95", "between tokens, ms: p50", "p95")


def bench(
    model: Annotated[
        str | None, typer.Argument(envvar="GENSERVE_MODEL", help="Default: the only model of the server.")
    ] = None,
    url: Annotated[
        str, typer.Option(envvar="GENSERVE_BASE_URL", help="URL of the server; the key is GENSERVE_API_KEY.")
    ] = "http://127.0.0.1:8000",
    api: Annotated[
        Literal["chat", "generate", "completions"],
        typer.Option(help="OpenAI chat, TGI /generate_stream, or OpenAI completions."),
    ] = "chat",
    concurrency: Annotated[
        list[int], typer.Option(min=1, help="Concurrent requests; repeatable.")
    ] = [1, 8, 32],  # noqa: B006  # typer copies it
    prompt_words: Annotated[int, typer.Option(min=1, help="Words per prompt, about one token each.")] = 40,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 128,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the prompts. Default: random, so the prefix cache has none.")
    ] = None,
    waves: Annotated[int, typer.Option(min=1, help="Consecutive requests per connection.")] = 4,
) -> None:
    """Measure a running server with streaming requests: tokens per second, and latencies in milliseconds.

    All prompts differ. On the server's machine, the client competes with it for the cores.
    """
    from rich.table import Table

    from genserve.cli.console import ConsoleProgress, make_console
    from genserve.cli.load_generator import Load, run_load
    from genserve.cli.model_access import choose_remote
    from genserve.client import Client

    address = urlsplit(url)
    if address.scheme != "http" or not address.hostname:
        raise typer.BadParameter(f"{url!r} is not http://HOST:PORT", param_hint="--url")
    with Client(url) as client:
        name = choose_remote(model, client.models())
    load = Load(
        host=address.hostname,
        port=address.port or 80,
        model=name,
        api=api,
        concurrency=1,
        num_requests=1,
        new_tokens=new_tokens,
        prompt_words=prompt_words,
        seed=random.getrandbits(32) if seed is None else seed,
        api_key=os.environ.get("GENSERVE_API_KEY", ""),
    )
    run_load(load)  # a warmup: the first request of a server is slower
    progress, table = ConsoleProgress(), Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for number, at_once in enumerate(concurrency, start=1):
        with progress.stage(f"{at_once} at once"):
            num_requests = at_once * waves
            wave = replace(load, concurrency=at_once, num_requests=num_requests, seed=load.seed + number)
            result = run_load(wave)
        table.add_row(str(at_once), *_cells(result))
    make_console().print(table)


def _cells(result: LoadResult) -> list[str]:
    from genserve.cli.load_generator import percentile

    rate = sum(result.new_tokens) / result.elapsed_s
    times = [
        f"{percentile(times_s, percent) * 1e3:.1f}" if times_s else ""
        for times_s in (result.first_text_s, result.gaps_s)
        for percent in (50, 95)
    ]
    return [f"{rate:.0f}", *times]
