"""Command lines: the commands of a shell block, and whether their programs accept them; none is run."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec

from genserve.cli.main import COMMANDS
from tests.docs.snippets import ROOT

__all__ = ["check_command", "commands"]

_SEPARATORS = ("|", "&&", ";", "&")
_REDIRECTIONS = (">", ">>", "<")
_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_HERE_DOCUMENT = re.compile(r"<<-?\s*'?(\w+)'?\n.*?^\1$", re.MULTILINE | re.DOTALL)
_ASSIGNMENT = re.compile(r"^\w+=")
# Third-party programs, whose arguments are not checked.
_OTHERS = frozenset(
    (
        "apt-get", "bash", "cat", "cd", "claude", "cmake", "codex", "copilot", "cp", "curl", "diff", "echo",
        "export", "git", "helm", "hf", "jq", "kubectl", "lm_eval", "ls", "mkdir", "nginx", "node", "npm",
        "opencode", "openssl", "optimum-cli", "pi", "printf", "prometheus", "qwen", "ray", "serve",
        "sglang-router", "sh", "source", "tar", "vllm-router", ".",
    )
)  # fmt: skip

_MODULES = ("onnxruntime_genai", "pip", "venv")


def commands(text: str) -> list[list[str]]:
    """Return the commands of a block as words, those behind pipes included; redirections are left out."""
    text = _HERE_DOCUMENT.sub("", text)
    lexer = shlex.shlex(
        _COMMENT.sub(r"\1", text).replace("\\\n", " "), posix=True, punctuation_chars="|&;><\n"
    )
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    found: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word.strip("\n") in ("", *_SEPARATORS):
            found.append([])
        elif word in _REDIRECTIONS:
            next(words)
        elif found[-1] or not _ASSIGNMENT.match(word):
            found[-1].append(word)
    return [command for command in found if command]


def check_command(command: list[str]) -> None:
    """Fail unless the command's program is known and accepts the arguments."""
    program, *arguments = command
    if arguments[:1] == ["--from"]:     # uvx's option: a package with its extras
        _check_extras(arguments[1:2])
        arguments = arguments[2:]
    match program.rpartition("/")[2]:
        case "genserve":
            _check_genserve(arguments)
        case "uvx" | "docker" if "genserve" in (images := [_image(word) for word in arguments]):
            behind = arguments[images.index("genserve") + 1 :]
            if program == "uvx" or arguments[0] == "run":
                _check_genserve(behind or ["serve"])
        case "pip" | "uv":
            _check_extras(arguments)
        case "make":
            _check_targets(arguments)
        case "python" | "python3" | "pytest":
            _check_files(program, arguments)
        case name:
            assert name in _OTHERS, f"{name} is not a known program"


def _check_genserve(arguments: list[str]) -> None:
    name, *rest = arguments
    if name not in ("--help", "--version"):
        COMMANDS[name].read(name, rest)


def _image(word: str) -> str:
    return re.sub(r"(\[.*\])?([:=].*)?$", "", word)


def _check_extras(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"(?:genserve|\.)\[([\w,-]+)\]", " ".join(arguments)):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def _check_targets(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets, variables = (
        set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE)),
        "ARGS RUNTIME MODEL REPOSITORY PYTHON",
    )
    for word in arguments:
        name, is_variable, _ = word.partition("=")
        assert name in (variables.split() if is_variable else targets), word


def _check_files(program: str, arguments: list[str]) -> None:
    """Fail unless a script exists and knows its flags."""
    if arguments[:1] == ["-m"] and program != "pytest":
        package = arguments[1].partition(".")[0]
        assert package in _MODULES or find_spec(package), package
        return
    for path in _files(arguments):
        assert (ROOT / path).exists(), path
        if path.endswith(".py") and program != "pytest":
            source = (ROOT / path).read_text(encoding="utf-8")
            flags = [word.partition("=")[0] for word in arguments if word.startswith("--")]
            assert all(f'"{flag}"' in source for flag in flags), f"{path} has none of {flags}"


def _files(arguments: list[str]) -> Iterator[str]:
    for word in arguments:
        if word.endswith(".py") or word.startswith("tests/"):
            yield word
