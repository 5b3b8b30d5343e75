from __future__ import annotations

import re
import shlex

import pytest

from genserve.cli.main import COMMANDS, parsers
from tests.support.command_line import invoke
from tests.support.representatives import with_extended

NAMES = [*COMMANDS]


def help_of(command: str, **environment: str) -> str:
    result = invoke([command, "--help"], env=environment)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("columns", with_extended([40, 60, 80, 200], always={40}))
@pytest.mark.parametrize("command", NAMES)
def test_every_flag_is_shown_in_full_on_lines_that_fit(command: str, columns: int) -> None:
    lines = help_of(command, COLUMNS=str(columns)).splitlines()
    words = {word.rstrip(",") for line in lines for word in line.split()}
    options = [each for each in parsers()[command].parameters if not each.flag.is_argument]
    assert {name for option in options for name in (*option.names, *option.negations)} <= words
    # One word may be too long; the usage and the examples are to be copied.
    wrapped = [line for line in lines[: lines.index("Examples:")] if not line.startswith("Usage:")]
    assert [line for line in wrapped if len(line) > columns and len(line.split()) > 2] == []


def test_flags_are_below_their_headings() -> None:
    text = help_of("serve", COLUMNS="80")
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert headings[:4] == ["Arguments", "Models", "Ports", "Connections of gRPC"]
    assert headings[-2:] == ["Options", "Examples"]
    assert text.index("\nPorts:") < text.index("  --http-port") < text.index("\nAccess:")


def test_a_flag_is_shown_with_its_type_variable_default_and_range() -> None:
    words = " ".join(help_of("generate", COLUMNS="80").split())
    assert "--max-tokens <int> Maximum length of an answer, in tokens. [env: GENSERVE_MAX_TOKENS; " in words
    assert "--stop <text> " in words
    assert "--http-port <int> 0 takes a free port. [default: 8000; 0<=x<=65535]" in " ".join(
        help_of("serve", COLUMNS="80").split()
    )


def test_a_switch_is_shown_with_both_names_and_its_default() -> None:
    words = " ".join(help_of("serve", COLUMNS="80").split())
    assert re.search(r"--allow-grpc, --no-allow-grpc Serve KServe v2 over gRPC. \[default: on\]", words)
    assert re.search(r"--strict-placement, --no-strict-placement [^\[]*warning\. --", words)


def test_the_commands_are_below_their_headings_with_a_summary_of_one_line() -> None:
    shown = invoke(["--help"], env={"COLUMNS": "80"}).stdout
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{command.summary}$", shown, re.MULTILINE)
        assert f"\n{command.heading}:\n" in shown


@pytest.mark.parametrize("command", NAMES)
def test_the_examples_of_a_command_are_valid(command: str) -> None:
    assert COMMANDS[command].examples
    for example in COMMANDS[command].examples:
        assert f"  {example}\n" in help_of(command)
        written = re.search(rf"genserve {command}([^|)>]*)", example.rpartition("| ")[2])
        assert written
        COMMANDS[command].read(command, shlex.split(written[1]))


@pytest.mark.parametrize(
    ("environment", "is_bold"),
    [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({}, False)],
)
def test_headings_are_bold_where_colours_are_wanted(environment: dict[str, str], is_bold: bool) -> None:
    assert ("\x1b[1mUsage:" in help_of("version", **environment)) == is_bold
