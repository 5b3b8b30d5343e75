"""Main: the command group, and the exit codes of its errors."""

from __future__ import annotations

from typing import Annotated

import typer

import genserve
from genserve.cli.bench_command import bench
from genserve.cli.chat_command import chat
from genserve.cli.check_command import check
from genserve.cli.export_command import export, pull
from genserve.cli.generate_command import generate
from genserve.cli.models_command import models
from genserve.cli.serve_command import serve
from genserve.cli.tritonserver_flags import TritonserverCommand
from genserve.cli.tune_command import tune
from genserve.errors import GenserveError

app = typer.Typer(
    name="genserve",
    help="Serve text-generation models from a model repository in Triton's format.",
    epilog="Start here: genserve pull smollm2, then genserve chat",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command(
    cls=TritonserverCommand,
    epilog="Example: genserve serve --model-repository ./model_repository --http-port 8000",
)(serve)
app.command(epilog="Example: genserve chat smollm2 --system 'Answer in one sentence.'")(chat)
app.command(epilog="Example: echo 'The capital of France is' | genserve generate --max-tokens 8")(generate)
app.command(epilog="Example: genserve pull smollm2")(pull)
app.command(epilog="Example: genserve export ./checkpoint --name mine --precision int8")(export)
app.command(epilog="Example: genserve check --model-repository ./model_repository --strict")(check)
app.command(epilog="Example: genserve bench smollm2 --concurrency 32 --new-tokens 128")(bench)
app.command(epilog="Example: genserve tune smollm2 --max-inter-token-ms 40 --plot tune.png")(tune)
app.command(epilog="Example: genserve models --url http://127.0.0.1:8000")(models)


@app.command(epilog="Example: genserve version")
def version() -> None:
    """Print the version."""
    print(genserve.__version__)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line.

    Exit codes: 0 success; 1 a GenserveError, printed with its remedy, or errors found by `genserve check`, or
    a server that did not end in time after a signal; 2 wrong usage; 130 Ctrl-C.
    """
    try:
        app()
    except GenserveError as error:
        from genserve.cli.console import print_error

        print_error(error)
        raise SystemExit(1) from None
