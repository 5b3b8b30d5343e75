"""QA script: runs one of Triton's qa scripts in namespaces of its own, and reads its checks from a trace."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from conformance.triton_qa.qa_workspace import HERE, VERSION, Workspace
from genserve.version import __version__

Outcome = Literal["passed", "failed", "skipped"]

# Replaces the second line of a script, a comment: bash writes each command with its line. A script goes on
# without models that are missing, and without a server that did not start (its id is 0) or has ended.
_TRACE = (
    'kill() { [ "$1" = 0 ] || builtin kill "$@" || [[ $- = *e* && $1 != -0 ]]; }; '
    'cp() { command cp "$@" || [[ $- = *e* ]]; }; '
    'wait() { [ "$1" = 0 ] || builtin wait "$@" || { local s=$?; [[ $- = *e* ]] || return $s; }; }; '
    "exec 19>>$QA_TRACE; BASH_XTRACEFD=19; PS4='+QA|${BASH_SOURCE}|${LINENO}|'; set -x\n"
)
_NOT_STARTED = re.compile(r"(Failed to start.*\n(?:.*\n){0,3}?\s*)exit 1$", re.MULTILINE)
_TRACED = re.compile(r"\++QA\|(?:.*/)?test\.sh\|(\d+)\|")
_NAMESPACES = ["--map-root-user", "--net", "--mount", "--mount-proc", "--pid", "--fork", "--kill-child"]
_PRIVATE = ("/dev/shm", "/var/log/nginx", "/var/lib/nginx")
_FAILED = re.compile(r"^\s*(?:RET|EXIT_CODE|return|exit)[= ]1\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A row of groups.toml."""

    name: str                           # the folder in qa/, with the subfolder if the script is a part
    minutes: float = 10.0               # the time limit
    script: str = "test.sh"
    # Regular expressions and their replacements in the script, and in other files of the folder, by name.
    edits: tuple[tuple[str, str], ...] = ()
    file_edits: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    setup: str = ""                     # shell commands before the script
    variables: dict[str, str] = field(default_factory=dict)     # environment variables of the script


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A test, or a condition of the script itself."""

    name: str           # `file.Class.test`, or `test.sh:LINE: what the script says when it fails`
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRun:
    """The results of a script."""

    group: str
    status: int         # the script's exit status: 0 if it says that it passed; 124: its time was up
    seconds: float
    tests: list[Check]
    conditions: list[Check]


def run_group(workspace: Workspace, group: Group, *, logs: Path) -> GroupRun:
    """Run the script of a group; its output is written to `logs`."""
    if not workspace.root.is_absolute():
        raise ValueError("the workspace must be an absolute path: PATH begins with it")
    folder = workspace.qa / group.name
    script = folder / group.script
    original = folder / f"{group.script}.original"
    if not original.exists():
        shutil.copy(script, original)
    text = _instrumented(original.read_text(encoding="utf-8"), group)
    script.write_text(text, encoding="utf-8")
    for name, edits in group.file_edits.items():
        file = folder / name
        file.write_text(_edited(file.read_text(encoding="utf-8"), edits), encoding="utf-8")
    logs.mkdir(parents=True, exist_ok=True)
    stem = group.name.replace("/", ".")
    results, trace = logs / f"{stem}.jsonl", logs / f"{stem}.trace"
    for file in (results, trace):
        file.write_text("", encoding="utf-8")
    begun = time.monotonic()
    with (logs / f"{stem}.log").open("w", encoding="utf-8") as log:
        environment = _environment(workspace, group, results, trace)
        status = _run(_command(group), folder, environment, log, group.minutes)
    _keep_logs(folder, logs / stem)
    return GroupRun(
        group=group.name,
        status=status,
        seconds=round(time.monotonic() - begun, 1),
        tests=list(_tests(results)),
        conditions=list(_conditions(text.splitlines(), trace)),
    )


def _instrumented(text: str, group: Group) -> str:
    text = _edited(text, group.edits)
    text = _NOT_STARTED.sub(r"\1RET=1", text)
    first, _, rest = text.partition("\n")
    second, _, rest = rest.partition("\n")
    if second.strip() and not second.startswith("#"):
        raise ValueError(f"{group.name}: the second line of the script is no comment")
    return f"{first}\n{_TRACE}{rest}"


def _edited(text: str, edits: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in edits:
        text, number = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if not number:
            print(f"nothing matches {pattern}")
    return text


def _command(group: Group) -> str:
    private = [f"[ ! -d {folder} ] || mount -t tmpfs tmpfs {folder}" for folder in _PRIVATE]
    # Scripts install packages, which must never change the environment of this program.
    kept = f"mount --bind {sys.prefix} {sys.prefix} && mount -o remount,bind,ro {sys.prefix} || exit 1"
    return "\n".join(["ip link set lo up", kept, *private, group.setup, f"bash {group.script} {VERSION}"])


def _environment(workspace: Workspace, group: Group, results: Path, trace: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "PATH", "TERM")}
    return {
        **kept,
        "PATH": f"{workspace.programs}:{workspace.environment}/bin:{kept['PATH']}",
        "PYTHONPATH": str(HERE / "recorder"),
        "PYTEST_PLUGINS": "qa_pytest_recorder",
        "QA_RESULTS": str(results.absolute()),
        "QA_TRACE": str(trace.absolute()),
        "NVIDIA_TRITON_SERVER_VERSION": VERSION,
        "TRITON_REPO_ORGANIZATION": str(workspace.root / "organization"),
        "PYTHON_BACKEND_REPO_TAG": VERSION,
        "TEST_JETSON": "1",      # no GPU tensors
        "TEST_WINDOWS": "0",
        "TRITON_DIR": str(workspace.triton),
        "TRITON_SERVER_VERSION": __version__,
        **(_of_a_part(workspace, group) if "/" in group.name else {}),
        **group.variables,
    }


def _of_a_part(workspace: Workspace, group: Group) -> dict[str, str]:
    """Return the variables that the script of a whole group exports to the scripts of its parts."""
    return {
        "SERVER": str(workspace.triton / "bin/tritonserver"),
        "BACKEND_DIR": str(workspace.triton / "backends"),
        "DATADIR": str(workspace.data),
        "MODELDIR": str((workspace.qa / group.name).parent),
    }


def _run(command: str, folder: Path, environment: dict[str, str], log: Any, minutes: float) -> int:
    process = subprocess.Popen(
        ["unshare", *_NAMESPACES, "bash", "-c", command],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True,     # a script that kills its process group must not end this program
    )
    try:
        return process.wait(timeout=60 * minutes)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)     # also ends every process in its namespace
        process.wait()
        return 124


def _keep_logs(folder: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in folder.glob("*.log*"):
        if file.is_file() and file.stat().st_size < 10_000_000:
            shutil.copy(file, target / file.name)


def _tests(results: Path) -> Iterator[Check]:
    """Yield each test once; it failed if one of its runs failed or never ended."""
    runs: dict[str, list[dict[str, str]]] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        runs.setdefault(entry["test"], []).append(entry)
    methods = {name.rpartition(".")[2] for name in runs if not name.startswith("pytest:")}
    for name, entries in runs.items():
        if name.startswith("pytest:") and name.rpartition(".")[2] in methods:
            continue    # a method of a unittest class, which records its own name
        failed = next((entry for entry in entries if entry["outcome"] == "failed"), None)
        ends = sum(entry["outcome"] != "begun" for entry in entries)
        if failed:
            yield Check(name=name, outcome="failed", detail=_last_line(failed["detail"]))
        elif ends < len(entries) - ends:
            yield Check(name=name, outcome="failed", detail="did not end")
        else:
            skipped = all(entry["outcome"] in ("begun", "skipped") for entry in entries)
            yield Check(name=name, outcome="skipped" if skipped else "passed")


def _last_line(detail: str) -> str:
    lines = [line for line in detail.strip().splitlines() if line.strip()]
    return lines[-1][:400] if lines else ""


def _conditions(lines: list[str], trace: Path) -> Iterator[Check]:
    """Yield each condition that the script reached; it failed if its `RET=1` was executed."""
    traced = set()
    with trace.open(encoding="utf-8", errors="replace") as trace_lines:
        for line in trace_lines:
            if found := _TRACED.match(line):
                traced.add(int(found[1]))
    for number, (begin, end) in _failures(lines):
        if traced.intersection(range(begin, end + 1)):
            said = re.findall(r"\*\*\* +(.+?)(?:\\n|\"|$)", "\n".join(lines[end:number]))
            text = said[0] if said else " ".join(line.strip() for line in lines[begin - 1 : end])
            yield Check(name=f"test.sh:{number}: {text}", outcome="failed" if number in traced else "passed")


def _failures(lines: list[str]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the line of each `RET=1`, and the first and last line of the condition around it."""
    around: list[tuple[int, int]] = []
    waiting = 0
    for number, line in enumerate(lines, 1):
        word = line.strip()
        if re.match(r"(el)?if\b", word):
            if word.startswith("elif") and around:
                around.pop()
            waiting = number
        if waiting and re.search(r"\bthen\b", word):
            around.append((waiting, number))
            waiting = 0
        elif word == "fi" or word.startswith("fi "):
            if around:
                around.pop()
        elif _FAILED.match(line) and around:
            yield number, around[-1]
