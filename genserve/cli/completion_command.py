"""Completion: what may follow on a command line that is being typed, and the scripts that let shells ask."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

# The script of a shell asks `genserve __complete SHELL LINE`. Each line of the answer is a candidate, a tab
# and its help; or this, if the shell is to complete the names of files.
FILES = ":files"

_BASH = r"""
_genserve() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
            :files) compopt -o default ;;
            *) COMPREPLY+=("${line%%$'\t'*}") ;;
        esac
    done < <("$1" __complete bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -F _genserve genserve
"""
_ZSH = r"""
#compdef genserve
_genserve() {
    local line
    local -a plain open
    for line in ${(f)"$($words[1] __complete zsh "${(j: :)words[1,CURRENT]}" 2>/dev/null)"}; do
        case $line in
            :files) compset -P '*='; _files; return ;;
            *=$'\t'*) open+=("${${line//:/\\:}/$'\t'/:}") ;;
            *) plain+=("${${line//:/\\:}/$'\t'/:}") ;;
        esac
    done
    compset -P '*='
    (( $#open )) && _describe -t values value open -S ''
    (( $#plain )) && _describe -t values value plain
}
if [[ $funcstack[1] == _genserve ]]; then _genserve "$@"; else compdef _genserve genserve; fi
"""
_FISH = r"""
function __genserve_complete
    set -l command (commandline --current-process --cut-at-cursor | string collect)
    for line in (genserve __complete fish $command 2>/dev/null)
        if test $line = :files
            set -l word (commandline --current-token --cut-at-cursor)
            __fish_complete_path (string replace --regex '^--[^=]*=' '' -- $word)
        else
            echo $line
        end
    end
end
complete --command genserve --no-files --arguments '(__genserve_complete)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

Shell = Literal["bash", "zsh", "fish"]
Candidate = tuple[str, str]     # a word that may follow, and its help


def completion(shell: Annotated[Shell, typer.Argument(help="The shell to complete commands in.")]) -> None:
    """Print the script that completes commands, flags, models and parameters in your shell."""
    print(_SCRIPTS[shell].strip())


def answer(shell: str, line: str) -> str:
    """Return the candidates for the end of a command line, as the script of the shell reads them."""
    *words, last = _split(line)
    candidates = list(_candidates(words[1:], last))
    # bash, and zsh after `compset`, replace what follows the last separator; fish replaces the whole word.
    separators = {"bash": "=:", "zsh": "="}.get(shell, "")
    replaced = max((last.rfind(each) for each in separators), default=-1) + 1
    return "\n".join(
        word if word == FILES else f"{word[replaced:]}\t{' '.join(text.split())}" for word, text in candidates
    )


def _split(line: str) -> list[str]:
    """Return the words of a line; the last one may be empty, or lack its closing quote."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:
        return [*words, lexer.token or ""]
    return [*words, ""] if not line or line[-1].isspace() else words


def _candidates(words: list[str], last: str) -> Iterator[Candidate]:
    """Yield what `last` may become, after these words."""
    from genserve.cli.main import COMMANDS

    name, arguments = (words[0], words[1:]) if words else ("", [])
    if not name:
        commands = {command: entry.summary for command, entry in COMMANDS.items()}
        flags = {"--help": "Show the help.", "--version": "Print the version."}
        yield from ((word, text) for word, text in (commands | flags).items() if word.startswith(last))
    elif name in COMMANDS:
        command = COMMANDS[name].load(name)
        # Not `make_context`: to parse the values takes 0.1 s, for the import of pydantic.
        context = typer.Context(command, info_name=name)
        yield from _of_command(command.get_params(context), context, arguments, last)


def _of_command(
    parameters: Sequence[Any], context: typer.Context, words: list[str], last: str
) -> Iterator[Candidate]:
    """Yield what `last` may become after the words of a command; their values are the context's params."""
    options = {name: each for each in parameters for name in (*each.opts, *each.secondary_opts)}
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    num_given, rest, begun = 0, iter(words), None     # begun: an option that waits for its value
    for word in rest:
        flag, equals, value = word.partition("=")
        if word == "--":
            options, num_given = {}, num_given + len(list(rest))
        elif not word.startswith("-"):
            num_given += 1
        elif flag not in options:
            continue
        elif not _takes_value(options[flag]):
            context.params[options[flag].name] = True
        elif equals or (value := next(rest, "")):
            context.params[options[flag].name] = value
        else:
            begun = options[flag]
    flag, equals, value = last.partition("=")
    if begun is not None:
        yield from _values(begun, context, last)
    elif equals and flag in options and _takes_value(options[flag]):
        for word, text in _values(options[flag], context, value):
            yield word if word == FILES else f"{flag}={word}", text
    elif last.startswith("-") and options:
        yield from _flags(options, context, last)
    elif num_given < len(arguments) or (arguments and arguments[-1].nargs == -1):
        yield from _values(arguments[min(num_given, len(arguments) - 1)], context, last)
    elif not last:      # all arguments are there
        yield from _flags(options, context, last)


def _takes_value(option: Any) -> bool:
    return option.param_type_name == "option" and not option.is_flag


def _flags(options: Mapping[str, Any], context: typer.Context, begun: str) -> Iterator[Candidate]:
    for name, option in options.items():
        is_open = option.multiple if option.name in context.params else not option.hidden
        if is_open and name.startswith("--") and name.startswith(begun):
            yield name, option.help or ""


def _values(parameter: Any, context: Any, begun: str) -> Iterator[Candidate]:
    items = parameter.shell_complete(context, begun)
    yield from ((item.value, item.help or "") for item in items)
    is_path = "path>" in parameter.display_type(context).lower().replace("]", "")
    if not items and (parameter.param_type_name == "argument" or is_path):
        yield FILES, ""


# For `autocompletion` of typer's options and arguments.


def model_names(ctx: typer.Context) -> Iterator[str]:
    """Yield the models of the repository on the command line that may generate text, without loading any."""
    from genserve.store import default_repository

    given = ctx.params.get("model_repository") or os.environ.get("GENSERVE_MODEL_REPOSITORY")
    for folder in given.split(os.pathsep) if given else [default_repository()]:
        for config in sorted(Path(folder).glob("*/config.pbtxt")):
            # To parse the configs would take half a second.
            if re.search(rb"ensemble_scheduling|[\"']ensemble[\"']", config.read_bytes()):
                yield config.parent.name


def set_assignments(incomplete: str) -> Iterator[str]:
    """Yield NAME= of each sampling parameter; after the =, the values of those that have few."""
    from genserve.sampling.sampling_options import SamplingOptions

    name, equals, _ = incomplete.partition("=")
    if not equals:
        yield from (f"{known}=" for known in SamplingOptions.__annotations__)
        return
    hint = get_type_hints(SamplingOptions).get(name)
    values = ["true", "false"] if hint is bool else get_args(hint) if hint and "Literal" in repr(hint) else []
    yield from (f"{name}={value}" for value in values if isinstance(value, str))
