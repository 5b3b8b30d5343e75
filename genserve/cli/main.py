"""Main: the commands, and the exit codes of their errors."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import genserve
from genserve.cli.bench_flags import BenchCommand
from genserve.cli.flags import DOCUMENTATION
from genserve.cli.help_text import HelpCommand, Row, help_text, parameter_sections
from genserve.cli.tritonserver_flags import TritonserverCommand
from genserve.errors import GenserveError, closest

OK, ERROR, USAGE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEntry:
    """A command; its module is imported when it is used, so that `--help` and completion are quick."""

    heading: str                                # in `genserve --help`
    summary: str
    examples: tuple[str, ...]
    module: str = ""                            # in genserve.cli; empty: NAME_command
    command_class: type[TyperCommand] = HelpCommand

    def load(self, name: str) -> TyperCommand:
        """Import the command: the function of this name."""
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        function = getattr(import_module(f"genserve.cli.{self.module or f'{name}_command'}"), name)
        single.command(name, cls=self.command_class, epilog="\n".join(self.examples))(function)
        command = typer.main.get_command(single)
        assert isinstance(command, TyperCommand)
        return command


_RUN, _MODELS, _MEASURE, _MORE = "Serve and generate", "Models", "Measure", "More"
COMMANDS = {
    "serve": CommandEntry(
        heading=_RUN,
        summary="Serve models over HTTP and gRPC",
        examples=("genserve serve smollm2", "genserve serve --model-repository ./models --http-port 8000"),
        command_class=TritonserverCommand,
    ),
    "chat": CommandEntry(
        heading=_RUN,
        summary="Chat with a model in the terminal",
        examples=(
            "genserve chat",
            "genserve chat smollm2 'What is the capital of France?'",
            "cat notes.txt | genserve chat 'Summarise this.'",
        ),
    ),
    "generate": CommandEntry(
        heading=_RUN,
        summary="Complete a prompt, or answer a file of prompts",
        examples=(
            "echo 'The capital of France is' | genserve generate --max-tokens 8",
            "genserve generate --input prompts.jsonl --output answers.jsonl",
        ),
    ),
    "deploy": CommandEntry(
        heading=_RUN,
        summary="Serve models by replicas on a cluster",
        examples=(
            "genserve deploy ray smollm2 --min-replicas 1 --max-replicas 3",
            "genserve deploy ray --dry-run > serve.yaml",
            "genserve deploy ray --config serve.yaml --address http://127.0.0.1:8265 --detach",
        ),
    ),
    "pull": CommandEntry(
        module="export_command",
        heading=_MODELS,
        summary="Download a model into the repository",
        examples=("genserve pull smollm2",),
    ),
    "export": CommandEntry(
        heading=_MODELS,
        summary="Convert a checkpoint to a model of the repository",
        examples=("genserve export ./checkpoint --name mine --precision int8",),
    ),
    "models": CommandEntry(
        heading=_MODELS,
        summary="List the models of a repository or of a server",
        examples=("genserve models", "genserve models --url http://127.0.0.1:8000"),
    ),
    "remove": CommandEntry(
        heading=_MODELS,
        summary="Delete a model from the repository",
        examples=("genserve remove smollm2",),
    ),
    "check": CommandEntry(
        heading=_MODELS,
        summary="Find the errors in a model repository",
        examples=("genserve check --model-repository ./model_repository --strict",),
    ),
    "bench": CommandEntry(
        heading=_MEASURE,
        summary="Measure a running server",
        examples=(
            "genserve bench",
            "genserve bench smollm2 --max-concurrency 32 --goodput ttft:500 tpot:50",
            "genserve bench --backend openai --request-rate 4 --dataset-path prompts.jsonl",
        ),
        command_class=BenchCommand,
    ),
    "tune": CommandEntry(
        heading=_MEASURE,
        summary="Find the best settings of a model on this machine",
        examples=(
            "genserve tune smollm2 --max-inter-token-ms 40 --plot tune.png",
            "genserve tune smollm2 --step-times steps.json",
        ),
    ),
    "plan": CommandEntry(
        heading=_MEASURE,
        summary="Find how many replicas a load needs, by simulation",
        examples=(
            "genserve plan --step-times steps.json --request-rate 20 --target ttft_p99:2000",
            "genserve plan --step-times steps.json --trace trace.jsonl --replicas 4 --plot plan.png",
        ),
    ),
    "completion": CommandEntry(
        heading=_MORE,
        summary="Print the script that completes commands in bash, zsh or fish",
        examples=(
            'eval "$(genserve completion bash)"     # in ~/.bashrc',
            "source <(genserve completion zsh)      # in ~/.zshrc, below compinit",
            "genserve completion fish > ~/.config/fish/completions/genserve.fish",
        ),
    ),
    "version": CommandEntry(
        module="main", heading=_MORE, summary="Print the version", examples=("genserve version",)
    ),
}


class CommandGroup(TyperGroup):
    """The commands of the table above, and what their errors look like."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """Import a command; None: there is no such command."""
        return COMMANDS[cmd_name].load(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names; fails with the closest name."""
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            near = closest(args[0], known=COMMANDS)
            hint = f"did you mean `genserve {near}`?" if near else f"the commands are {', '.join(COMMANDS)}"
            _exit_usage(f"there is no command {args[0]!r}", remedy=hint)
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """Return the help, with the commands under their headings."""
        sections: dict[str, list[Row]] = {}
        for name, command in COMMANDS.items():
            sections.setdefault(command.heading, []).append((name, command.summary))
        return help_text(self, ctx, sections=sections | parameter_sections(self, ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command; without any argument, show the help."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            ctx.exit(USAGE)
        return super().parse_args(ctx, args)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the command line, which may print the help."""
        with _system_errors():
            return super().make_context(*arguments, **{"color": _color()} | options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and write what it has printed."""
        with _system_errors():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        """Run the command line and exit; usage errors look as all others do."""
        try:
            code = super().main(*arguments, **options | {"standalone_mode": False})
        except typer.TyperException as error:
            near = getattr(error, "possibilities", None)
            message = error.format_message().replace("Value error, ", "")   # the words of pydantic
            near = near or _closest_choice(message)
            context = getattr(error, "ctx", None)
            remedy = f"see `{context.command_path if context else 'genserve'} --help`"
            _exit_usage(message, remedy=f"did you mean {near[0]}?" if near else remedy)
        except typer.Abort:     # standard input ended at a question
            code = ERROR
        sys.exit(code or OK)


def _closest_choice(message: str) -> list[str]:
    """Return the value that was meant, if the message lists those that are allowed."""
    match re.findall("'([^']*)'", message.rpartition(": ")[2]):
        case [given, *allowed] if "is not one of" in message:
            near = closest(given, known=allowed)
            return [near] if near else []
    return []


def _exit_usage(message: str, *, remedy: str) -> NoReturn:
    typer.echo(f"error[usage]: {message}\n  remedy: {remedy}", err=True)
    sys.exit(USAGE)


@contextmanager
def _system_errors() -> Iterator[None]:
    """Report what the system says of a file or of a full disk, instead of a traceback.

    The end of the program that reads our output, such as `head`, is no error.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            if error.filename is None:
                raise
            remedy = "check the path and its permissions"
            raise GenserveError(f"{error.filename}: {error.strerror}", remedy=remedy) from error
        # The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            raise typer.Exit(BROKEN_PIPE) from None
        raise GenserveError(f"cannot write: {error.strerror}", remedy="free some space") from None


def _color() -> bool | None:
    """Whether help has colours, by the usual variables; None: on a terminal."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return True if os.environ.get("FORCE_COLOR") else None


app = typer.Typer(
    name="genserve",
    cls=CommandGroup,
    help=f"""Serve text-generation models from a model repository in Triton's format.

    `genserve COMMAND --help` explains a command. Exit codes: {OK} success, {ERROR} error, {USAGE} wrong
    usage, {INTERRUPTED} Ctrl-C, {BROKEN_PIPE} nobody reads the output. Documentation: {DOCUMENTATION}
    """,
    epilog="genserve pull smollm2\ngenserve chat",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def commands() -> dict[str, TyperCommand]:
    """Return all commands by their names, for the reference in the documentation."""
    return {name: command.load(name) for name, command in COMMANDS.items()}


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
    a server that did not end in time after a signal; 2 wrong usage; 130 Ctrl-C; 141 nobody reads the output.
    """
    _open_standard_streams()
    if sys.argv[1:2] == ["__complete"]:     # a shell asks; its script is completion_command.py's
        from genserve.cli.completion_command import answer

        print(answer(*sys.argv[2:4]))
        return
    try:
        app()
    except GenserveError as error:
        from genserve.cli.console import print_error

        print_error(error)
        raise SystemExit(ERROR) from None


def _open_standard_streams() -> None:
    """Let the standard streams accept all text, also where the shell has closed them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Otherwise the next file or socket would get the number, and with it what others print.
            null = os.open(os.devnull, os.O_RDWR)
            assert null == number
            setattr(sys, name, open(null, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A text may have characters that the locale's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
