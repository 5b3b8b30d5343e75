"""The command `genserve generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from genserve.cli.completion_command import model_names
from genserve.cli.flags import (
    JSON_FLAG,
    MAX_TOKENS,
    ModelFlags,
    SamplingFlags,
    sampling_flag,
    with_assignments,
)
from genserve.cli.parser import UsageError
from genserve.errors import GenserveError
from genserve.sampling.sampling_options import SamplingOptions
from genserve.settings import Flag, flag


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(SamplingFlags, ModelFlags):
    """The flags of `genserve generate`."""

    prompt: str | None = flag(None, Flag(help="Default, and -: the text on stdin.", is_argument=True))
    model: str | None = flag(
        None,
        Flag(
            help="Default: the only text model, or smollm2.",
            heading="Model",
            variable="GENSERVE_MODEL",
            complete=model_names,
        ),
    )
    max_tokens: int | None = flag(128, MAX_TOKENS)
    temperature: float = flag(
        0.0, sampling_flag(help="0: always the likeliest token.", variable="GENSERVE_TEMPERATURE")
    )
    top_k: int | None = flag(
        None,
        sampling_flag(help="Sample from the k likeliest tokens; 0: from all.", variable="GENSERVE_TOP_K"),
    )
    top_p: float | None = flag(
        None, sampling_flag(help="Sample from tokens of this total probability.", variable="GENSERVE_TOP_P")
    )
    stop: list[str] | None = flag(None, sampling_flag(help="End the text before this string; repeatable."))
    input_: Path | None = flag(
        None,
        Flag(
            help="Answer each line of this file of JSON objects, - for stdin: prompt or messages, with an id "
            "and sampling parameters; or the lines of OpenAI's batches.",
            heading="Batches",
        ),
    )
    output: Path | None = flag(
        None,
        Flag(
            help="Write the answers to this file. What it already has is not asked again. Default: stdout.",
            heading="Batches",
        ),
    )
    max_concurrency: int = flag(
        64, Flag(help="Lines that are answered at the same time.", heading="Batches", minimum=1)
    )
    json_: bool = flag(False, JSON_FLAG)

    def options(self) -> SamplingOptions:
        """Return the sampling parameters; raises InvalidRequest."""
        options = SamplingOptions(
            max_tokens=self.max_tokens, temperature=self.temperature, stop=self.stop or (), seed=self.seed
        )
        # Parameters that are not given have the model's default.
        if self.top_k is not None:
            options["top_k"] = self.top_k
        if self.top_p is not None:
            options["top_p"] = self.top_p
        return with_assignments(options, self.set_)


def generate(flags: GenerateFlags) -> None:
    """Complete a prompt, and print the text as it streams; or answer a file of prompts and chats.

    In a batch (--input, --output), each answer is a line with the id of its request, by default the line
    number. A failure is a line too, and then the exit code is 1. The flags are the parameters of lines that
    do not state their own. The format of the lines: https://genserve.github.io/genserve/cli/
    """
    options = flags.options()
    if flags.input_ is None and flags.output is None:
        _generate_one(flags, options)
    elif flags.prompt is not None:
        raise UsageError("PROMPT: a batch has its prompts in --input")
    else:
        _generate_batch(flags, options)


def _generate_one(flags: GenerateFlags, options: SamplingOptions) -> None:
    from genserve.cli.batch_files import answer_document
    from genserve.cli.console import make_console, print_json, read_text, write_text
    from genserve.cli.opened_models import open_model

    prompt = flags.prompt
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            print("Type the prompt, then Ctrl-D:", file=sys.stderr)
        # The last line end of a pipe is not part of the prompt, since it would change the answer.
        prompt = read_text().removesuffix("\n")
    console = make_console()
    opening = open_model(
        flags.model,
        repository=flags.model_repository,
        server=flags.server(),
        max_model_len=flags.max_model_len,
    )
    with (
        opening as opened,
        opened.text_model.stream(prompt, **options) as stream,
    ):
        if flags.json_:
            print_json({"model": opened.name, **answer_document(stream.final())})
            return
        for delta in stream:
            write_text(console, delta.text)
    write_text(console, "\n")


def _generate_batch(flags: GenerateFlags, options: SamplingOptions) -> None:
    from genserve.cli.batch import Batch, run_batch
    from genserve.cli.batch_files import open_answers, read_requests
    from genserve.cli.console import counted, make_console

    source, target = _file(flags.input_), _file(flags.output)
    lines = read_requests(source)
    answers = open_answers(target, lines)
    console = make_console(stderr=True)
    if answers.done:
        console.print(f"{target} has {len(answers.done)} of {counted(len(lines), 'answer')}")
    batch = Batch(lines=lines, options=options, max_concurrency=flags.max_concurrency)
    try:
        result = run_batch(
            batch,
            answers,
            model=flags.model,
            repository=flags.model_repository,
            remote=flags.server(),
            max_model_len=flags.max_model_len,
        )
    except (KeyboardInterrupt, GenserveError):
        if target is not None:
            console.print(f"stopped; the same command goes on from what is in {target}")
        raise
    console.print(
        f"{counted(result.num_answers, 'answer')}, {result.num_failed} failed; "
        f"{counted(result.num_tokens, 'token')} in "
        f"{result.elapsed_s:.1f} s, {result.tokens_per_s:.0f} tokens/s"
    )
    if result.num_failed:
        raise SystemExit(1)


def _file(path: Path | None) -> Path | None:
    return None if path == Path("-") else path
