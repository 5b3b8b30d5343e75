"""The command `genserve generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from genserve.cli.completion_command import model_names
from genserve.cli.flags import (
    Json,
    MaxTokens,
    ModelRepository,
    Seed,
    Set,
    Url,
    model_option,
    sampling_option,
    takes_flags,
    with_assignments,
)
from genserve.errors import GenserveError
from genserve.sampling.sampling_options import SamplingOptions

_batch_option = partial(typer.Option, rich_help_panel="Batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class _GenerateFlags:
    """The options of `genserve generate`."""

    prompt: Annotated[str | None, typer.Argument(help="Default, and -: the text on stdin.")] = None
    model: Annotated[
        str | None,
        model_option(
            envvar="GENSERVE_MODEL",
            help="Default: the only text model, or smollm2.",
            autocompletion=model_names,
        ),
    ] = None
    model_repository: ModelRepository = None
    url: Url = None
    max_tokens: MaxTokens = 128
    temperature: Annotated[
        float, sampling_option(envvar="GENSERVE_TEMPERATURE", help="0: always the likeliest token.")
    ] = 0.0
    top_k: Annotated[
        int | None,
        sampling_option(envvar="GENSERVE_TOP_K", help="Sample from the k likeliest tokens; 0: from all."),
    ] = None
    top_p: Annotated[
        float | None,
        sampling_option(envvar="GENSERVE_TOP_P", help="Sample from tokens of this total probability."),
    ] = None
    stop: Annotated[
        list[str] | None, sampling_option(help="End the text before this string; repeatable.")
    ] = None
    seed: Seed = None
    set_: Set = field(default_factory=list)
    input_: Annotated[
        Path | None,
        _batch_option(
            "--input",
            help="Answer each line of this file of JSON objects, - for stdin: prompt or messages, with an id "
            "and sampling parameters; or the lines of OpenAI's batches.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        _batch_option(
            help="Write the answers to this file. What it already has is not asked again. Default: stdout."
        ),
    ] = None
    max_concurrency: Annotated[
        int, _batch_option(min=1, help="Lines that are answered at the same time.")
    ] = 64
    json_: Json = False

    def options(self) -> SamplingOptions:
        """Return the sampling parameters; raises InvalidRequest."""
        options = SamplingOptions(
            max_tokens=self.max_tokens, temperature=self.temperature, stop=self.stop or (), seed=self.seed
        )
        # What is not given is the model's default.
        if self.top_k is not None:
            options["top_k"] = self.top_k
        if self.top_p is not None:
            options["top_p"] = self.top_p
        return with_assignments(options, self.set_)


@takes_flags(_GenerateFlags)
def generate(flags: _GenerateFlags) -> None:
    """Complete a prompt, and print the text as it streams; or answer a file of prompts and chats.

    Of a batch (--input, --output), each answer is a line with the id of its request, by default the number of
    its line. A failure is a line too, and the exit code is 1 then. The flags are the parameters of the lines
    that do not state their own. The lines: https://genserve.github.io/genserve/cli/
    """
    options = flags.options()
    if flags.input_ is None and flags.output is None:
        _generate_one(flags, options)
    elif flags.prompt is not None:
        raise typer.BadParameter("a batch has its prompts in --input", param_hint="prompt")
    else:
        _generate_batch(flags, options)


def _generate_one(flags: _GenerateFlags, options: SamplingOptions) -> None:
    from genserve.cli.batch_files import answer_document
    from genserve.cli.console import make_console, print_json, read_text, write_text
    from genserve.cli.model_access import open_model

    prompt = flags.prompt
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            print("Type the prompt, then Ctrl-D:", file=sys.stderr)
        # The last line end of a pipe is not part of the prompt: it would change the answer.
        prompt = read_text().removesuffix("\n")
    console = make_console()
    with (
        open_model(flags.model, repository=flags.model_repository, url=flags.url) as opened,
        opened.text_model.stream(prompt, **options) as stream,
    ):
        if flags.json_:
            print_json({"model": opened.name, **answer_document(stream.final())})
            return
        for delta in stream:
            write_text(console, delta.text)
    write_text(console, "\n")


def _generate_batch(flags: _GenerateFlags, options: SamplingOptions) -> None:
    from genserve.cli.batch import Batch, run_batch
    from genserve.cli.batch_files import open_answers, read_requests
    from genserve.cli.console import make_console

    source, target = _file(flags.input_), _file(flags.output)
    lines = read_requests(source)
    answers = open_answers(target, lines)
    console = make_console(stderr=True)
    if answers.done:
        console.print(f"{target} has {len(answers.done)} of {len(lines)} answers")
    batch = Batch(lines=lines, options=options, max_concurrency=flags.max_concurrency)
    try:
        result = run_batch(
            batch, answers, model=flags.model, repository=flags.model_repository, url=flags.url
        )
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


def _file(path: Path | None) -> Path | None:
    return None if path == Path("-") else path
