"""The command `genserve generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from genserve.cli.flags import (
    BatchInput,
    BatchOutput,
    Json,
    MaxConcurrency,
    MaxTokens,
    ModelOption,
    ModelRepository,
    Seed,
    Set,
    Stop,
    Temperature,
    TopK,
    TopP,
    Url,
    with_assignments,
)
from genserve.errors import GenserveError
from genserve.sampling.sampling_options import SamplingOptions


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Default, and -: the text on stdin.")] = None,
    model: ModelOption = None,
    model_repository: ModelRepository = None,
    url: Url = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    stop: Stop = None,
    seed: Seed = None,
    set_: Set = [],  # noqa: B006  # typer copies it
    input_: BatchInput = None,
    output: BatchOutput = None,
    max_concurrency: MaxConcurrency = 64,
    json_: Json = False,
) -> None:
    """Complete a prompt, and print the text as it streams; or answer a file of prompts and chats.

    Of a batch (--input, --output), each answer is a line with the id of its request, by default the number of
    its line. A failure is a line too, and the exit code is 1 then. The flags are the parameters of the lines
    that do not state their own. The lines: https://genserve.github.io/genserve/cli/
    """
    options = SamplingOptions(max_tokens=max_tokens, temperature=temperature, stop=stop or (), seed=seed)
    # What is not given is the model's default.
    if top_k is not None:
        options["top_k"] = top_k
    if top_p is not None:
        options["top_p"] = top_p
    options = with_assignments(options, set_)
    if input_ is not None or output is not None:
        if prompt is not None:
            raise typer.BadParameter("a batch has its prompts in --input", param_hint="prompt")
        _generate_batch(
            _file(input_),
            _file(output),
            options=options,
            max_concurrency=max_concurrency,
            model=model,
            repository=model_repository,
            url=url,
        )
    else:
        _generate_one(
            prompt, options=options, model=model, repository=model_repository, url=url, as_json=json_
        )


def _file(path: Path | None) -> Path | None:
    return None if path == Path("-") else path


def _generate_one(
    prompt: str | None,
    *,
    options: SamplingOptions,
    model: str | None,
    repository: Path | None,
    url: str | None,
    as_json: bool,
) -> None:
    from genserve.cli.batch_files import answer_document
    from genserve.cli.console import make_console, print_json, read_text, write_text
    from genserve.cli.model_access import open_model

    if prompt in (None, "-"):
        if sys.stdin.isatty():
            print("Type the prompt, then Ctrl-D:", file=sys.stderr)
        # The last line end of a pipe is not part of the prompt: it would change the answer.
        prompt = read_text().removesuffix("\n")
    console = make_console()
    with (
        open_model(model, repository=repository, url=url) as opened,
        opened.text_model.stream(prompt, **options) as stream,
    ):
        if as_json:
            print_json({"model": opened.name, **answer_document(stream.final())})
            return
        for delta in stream:
            write_text(console, delta.text)
    write_text(console, "\n")


def _generate_batch(
    source: Path | None,
    target: Path | None,
    *,
    options: SamplingOptions,
    max_concurrency: int,
    model: str | None,
    repository: Path | None,
    url: str | None,
) -> None:
    from genserve.cli.batch import Batch, run_batch
    from genserve.cli.batch_files import open_answers, read_requests
    from genserve.cli.console import make_console

    lines = read_requests(source)
    answers = open_answers(target, lines)
    console = make_console(stderr=True)
    if answers.done:
        console.print(f"{target} has {len(answers.done)} of {len(lines)} answers")
    batch = Batch(lines=lines, options=options, max_concurrency=max_concurrency)
    try:
        result = run_batch(batch, answers, model=model, repository=repository, url=url)
    except (KeyboardInterrupt, GenserveError):
        if target is not None:
            console.print(f"stopped; the same command goes on from what is in {target}")
        raise
    console.print(
        f"{result.num_answers} answers, {result.num_failed} failed; {result.num_tokens:,} tokens in "
        f"{result.elapsed_s:.1f} s, {result.tokens_per_s:.0f} tokens/s"
    )
    if result.num_failed:
        raise typer.Exit(1)
