"""Main: the table of commands, and the exit codes of their errors."""

from __future__ import annotations

import argparse
import errno
import io
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_type_hints

import genserve
from genserve.cli.flags import DOCUMENTATION
from genserve.cli.parser import CommandParser, Row, UsageError, help_text
from genserve.cli.tritonserver_flags import tritonserver_words
from genserve.errors import GenserveError, closest

OK, ERROR, USAGE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command; its module is imported when it is used, so that `--help` and completion are quick.

    Attributes:
        module: the module of `genserve.cli` with the function of the command's name; empty: NAME_command.
    """

    heading: str                                # in `genserve --help`
    summary: str
    examples: tuple[str, ...]
    module: str = ""

    def function(self, name: str) -> Callable[[Any], None]:
        """Import the function of the command, which takes a dataclass of flags."""
        function: Callable[[Any], None] = getattr(
            import_module(f"genserve.cli.{self.module or f'{name}_command'}"), name
        )
        return function

    def parser(self, name: str) -> CommandParser:
        """Import the command, and return its parser."""
        return CommandParser(prog=f"genserve {name}", **self.parser_options(name))

    def parser_options(self, name: str) -> dict[str, Any]:
        """Import the command, and return the arguments for its parser."""
        function = self.function(name)
        flags = get_type_hints(function)["flags"]
        return {"flags": flags, "description": function.__doc__ or "", "examples": self.examples}

    def read(self, name: str, words: Sequence[str]) -> Any:
        """Return the flags of a command line, whose `words` follow the name."""
        parser = self.parser(name)
        if name == "serve":
            words = tritonserver_words(words, switches=parser.switches)
        return parser.read(words)


_RUN, _MODELS, _MEASURE, _MORE = "Serve and generate", "Models", "Measure", "More"
COMMANDS = {
    "serve": Command(
        heading=_RUN,
        summary="Serve models over HTTP and gRPC",
        examples=("genserve serve smollm2", "genserve serve --model-repository ./models --http-port 8000"),
    ),
    "chat": Command(
        heading=_RUN,
        summary="Chat with a model in the terminal",
        examples=(
            "genserve chat",
            "genserve chat smollm2 'What is the capital of Japan?'",
            "cat notes.txt | genserve chat 'Summarise this.'",
        ),
    ),
    "generate": Command(
        heading=_RUN,
        summary="Complete a prompt, or answer a file of prompts",
        examples=(
            "echo 'The capital of Japan is' | genserve generate --max-tokens 8",
            "genserve generate --input prompts.jsonl --output answers.jsonl",
        ),
    ),
    "launch": Command(
        heading=_RUN,
        summary="Run a coding agent with a model",
        examples=(
            "genserve launch codex --model Qwen/Qwen3-4B",
            "genserve launch claude --url http://127.0.0.1:8000 -- --resume",
            "genserve launch opencode --url http://127.0.0.1:8000 --print",
        ),
    ),
    "deploy": Command(
        heading=_RUN,
        summary="Serve models by replicas on a cluster",
        examples=(
            "genserve deploy ray smollm2 --min-replicas 1 --max-replicas 3",
            "genserve deploy ray --dry-run > serve.yaml",
            "genserve deploy ray --config serve.yaml --address http://127.0.0.1:8265 --detach",
        ),
    ),
    "pull": Command(
        module="export_command",
        heading=_MODELS,
        summary="Download a model into the repository",
        examples=("genserve pull smollm2", "genserve pull qwen3-0.6b", "genserve pull ORG/NAME"),
    ),
    "export": Command(
        heading=_MODELS,
        summary="Convert a checkpoint to a model of the repository",
        examples=("genserve export ./checkpoint --name mine --precision int8",),
    ),
    "models": Command(
        heading=_MODELS,
        summary="List the models of a repository or of a server, or those to pull",
        examples=(
            "genserve models",
            "genserve models --available",
            "genserve models --url http://127.0.0.1:8000",
        ),
    ),
    "remove": Command(
        heading=_MODELS,
        summary="Delete a model from the repository",
        examples=("genserve remove smollm2",),
    ),
    "check": Command(
        heading=_MODELS,
        summary="Find the errors in a model repository",
        examples=(
            "genserve check --model-repository ./model_repository --strict",
            "genserve check --model-repository ./model_repository --run",
        ),
    ),
    "calibrate": Command(
        heading=_MODELS,
        summary="Fit the probabilities of decisions to labelled answers",
        examples=(
            "genserve calibrate smollm2 labelled.jsonl",
            "genserve calibrate smollm2 labelled.jsonl --dry-run",
        ),
    ),
    "cache": Command(
        heading=_MODELS,
        summary="Compute the beginning of prompts into the repository",
        examples=(
            "genserve cache build smollm2 --system system.txt",
            "genserve cache build qwen3-0.6b --system agent.txt --tools tools.json",
        ),
    ),
    "verify": Command(
        heading=_MODELS,
        summary="Repeat an answer by its receipt, and compare",
        examples=(
            "genserve verify answer.json",
            "genserve verify answer.json --model-repository ./models",
        ),
    ),
    "bench": Command(
        heading=_MEASURE,
        summary="Measure a running server",
        examples=(
            "genserve bench",
            "genserve bench smollm2 --max-concurrency 32 --goodput ttft:500 tpot:50",
            "genserve bench --backend openai --request-rate 4 --dataset-path prompts.jsonl",
        ),
    ),
    "tune": Command(
        heading=_MEASURE,
        summary="Find the best settings of a model on this machine",
        examples=(
            "genserve tune smollm2 --max-inter-token-ms 40 --plot tune.png",
            "genserve tune smollm2 --step-times steps.json",
        ),
    ),
    "plan": Command(
        heading=_MEASURE,
        summary="Find how many replicas a load needs, by simulation",
        examples=(
            "genserve plan --step-times steps.json --request-rate 20 --target ttft_p99:2000",
            "genserve plan --step-times steps.json --trace trace.jsonl --replicas 4 --plot plan.png",
        ),
    ),
    "completion": Command(
        heading=_MORE,
        summary="Print the script that completes commands in bash, zsh or fish",
        examples=(
            'eval "$(genserve completion bash)"     # in ~/.bashrc',
            "source <(genserve completion zsh)      # in ~/.zshrc, below compinit",
            "genserve completion fish > ~/.config/fish/completions/genserve.fish",
        ),
    ),
    "version": Command(
        module="main", heading=_MORE, summary="Print the version", examples=("genserve version",)
    ),
}
# The names that Ollama and vLLM have for our commands.
_OTHER_NAMES = {
    "run": "chat",
    "complete": "generate",
    "list": "models",
    "ls": "models",
    "show": "models",
    "ps": "models --url http://127.0.0.1:8000",
    "rm": "remove",
    "delete": "remove",
    "create": "export",
    "start": "serve",
    "search": "models --available",
}
_WITH_MODEL = ("chat", "remove")    # whose arguments are those of the other name


@dataclass(frozen=True)
class VersionFlags:
    """`genserve version` has no flags."""


def version(flags: VersionFlags) -> None:
    """Print the version."""
    print(genserve.__version__)


def main() -> None:
    """Run the command line.

    Exit codes: 0 success; 1 a GenserveError, printed with its remedy, or errors or changed answers found by
    `genserve check`, or another answer found by `genserve verify`, or a server that did not end in time after
    a signal; 2 wrong usage, or a receipt that `genserve verify` cannot verify; 130 Ctrl-C; 141 nobody reads
    the output.
    """
    _open_standard_streams()
    if "_ARGCOMPLETE" in os.environ:    # a shell asks, by the script of completion_command.py
        _complete()
        return
    try:
        with _system_errors():
            try:
                _run(sys.argv[1:])
            finally:
                sys.stdout.flush()
    except GenserveError as error:
        from genserve.cli.console import print_error

        print_error(error)
        raise SystemExit(USAGE if isinstance(error, UsageError) else ERROR) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except EOFError:    # standard input ended at a question
        raise SystemExit(ERROR) from None


def _run(words: Sequence[str]) -> None:
    match words:
        case []:
            print(_help(), end="", file=sys.stderr)
            raise SystemExit(USAGE)
        case ["-h" | "--help", *_]:
            print(_help(), end="")
        case ["help", *rest]:
            _run([*rest, "--help"])
        case ["--version", *_]:
            version(VersionFlags())
        case [name, *rest] if name in COMMANDS:
            try:
                command = COMMANDS[name]
                command.function(name)(command.read(name, rest))
            except UsageError as error:
                error.remedy = error.remedy or f"see `genserve {name} --help`"
                raise
        case [word, *rest]:
            near = _OTHER_NAMES.get(word) or closest(word, known=COMMANDS)
            more = f" {shlex.join(rest)}" if near in _WITH_MODEL and rest else ""
            known = f"the commands are {', '.join(COMMANDS)}"
            hint = f"did you mean `genserve {near}{more}`?" if near else known
            kind = "flag" if word.startswith("-") else "command"
            raise UsageError(f"there is no {kind} {word!r}", remedy=hint)


def _help() -> str:
    description = f"""Serve text-generation models from a model repository in Triton's format.

    `genserve COMMAND --help` explains a command. Exit codes: {OK} success, {ERROR} error, {USAGE} wrong
    usage, {INTERRUPTED} Ctrl-C, {BROKEN_PIPE} nobody reads the output. Documentation: {DOCUMENTATION}
    """
    sections: dict[str, list[Row]] = {}
    for name, command in COMMANDS.items():
        sections.setdefault(command.heading, []).append((name, command.summary))
    options = [("--version", "Print the version."), ("-h, --help", "Show this help.")]
    return help_text(
        description,
        usage="genserve [OPTIONS] COMMAND",
        sections=sections | {"Options": options},
        examples=("genserve pull smollm2", "genserve chat"),
    )


def _complete() -> None:
    """Print the completions of the line that a user of a shell is typing, and exit."""
    import argcomplete

    parser = argparse.ArgumentParser(prog="genserve")
    parser.add_argument("--version", action="store_true", help="Print the version.")
    commands = parser.add_subparsers(parser_class=CommandParser)
    for name, command in COMMANDS.items():
        # Import only the command on the line.
        is_used = name in os.environ["COMP_LINE"].split()
        options = {"flags": VersionFlags, "description": "", "examples": ()}
        commands.add_parser(
            name, help=command.summary, **command.parser_options(name) if is_used else options
        )
    argcomplete.autocomplete(parser)


@contextmanager
def _system_errors() -> Iterator[None]:
    """Report the system's errors about files or a full disk without a traceback.

    It is no error if the program that reads our output, such as `head`, has ended.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            if error.filename is None:
                raise
            remedy = "check the path and its permissions"
            raise GenserveError(f"{error.filename}: {error.strerror}", remedy=remedy) from error
        # The interpreter flushes the streams once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            raise SystemExit(BROKEN_PIPE) from None
        raise GenserveError(f"cannot write: {error.strerror}", remedy="free some space") from None


def parsers() -> dict[str, CommandParser]:
    """Return the parsers of all commands by their names, for the reference in the documentation."""
    return {name: command.parser(name) for name, command in COMMANDS.items()}


def _open_standard_streams() -> None:
    """Let the standard streams accept all text, even if the shell has closed them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Otherwise the next file or socket would get the number, and the output meant for the stream.
            null = os.open(os.devnull, os.O_RDWR)
            assert null == number
            setattr(sys, name, open(null, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A text may have characters that the locale's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
