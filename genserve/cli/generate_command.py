"""The command `genserve generate`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from genserve.cli.flags import (
    SAMPLING,
    Json,
    MaxTokens,
    ModelOption,
    ModelRepository,
    Seed,
    Set,
    Temperature,
    Url,
    with_assignments,
)
from genserve.sampling.sampling_options import SamplingOptions


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")] = "-",
    model: ModelOption = None,
    model_repository: ModelRepository = None,
    url: Url = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(
            envvar="GENSERVE_TOP_K",
            help="Sample from the k likeliest tokens; 0: from all.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            envvar="GENSERVE_TOP_P",
            help="Sample from tokens of this total probability.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the text before this string; repeatable.", rich_help_panel=SAMPLING),
    ] = None,
    seed: Seed = None,
    set_: Set = [],  # noqa: B006  # typer copies it
    json_: Json = False,
) -> None:
    """Complete a prompt, and print the text as it streams."""
    from genserve.cli.console import make_console, print_json, read_text, write_text
    from genserve.cli.model_access import open_model

    options = SamplingOptions(max_tokens=max_tokens, temperature=temperature, stop=stop or (), seed=seed)
    # What is not given is the model's default.
    if top_k is not None:
        options["top_k"] = top_k
    if top_p is not None:
        options["top_p"] = top_p
    options = with_assignments(options, set_)
    if prompt == "-":
        if sys.stdin.isatty():
            print("Type the prompt, then Ctrl-D:", file=sys.stderr)
        # The last line end of a pipe is not part of the prompt: it would change the answer.
        prompt = read_text().removesuffix("\n")
    console = make_console()
    with (
        open_model(model, repository=model_repository, url=url) as opened,
        opened.text_model.stream(prompt, **options) as stream,
    ):
        if json_:
            print_json({"model": opened.name, **asdict(stream.final())})
            return
        for delta in stream:
            write_text(console, delta.text)
    write_text(console, "\n")
