"""Client programs: run the programs in the folders of clients/, and read the rows that they print.

A program reads GENSERVE_URL, GENSERVE_MODEL, GENSERVE_ENCODER, the name of a model of vectors, and
GENSERVE_TOKENIZER, the folder of the model's tokenizer. It prints one JSON object per row, {"row": "tools,
streamed", "ok": true, "detail": ""}, and exits with 0. A row that is not ok may say `"cause": "text"`: the
protocol was correct, but the model's text is not what the client needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from conformance.environments import Environment

FOLDER = Path(__file__).with_name("clients")
_STOP_S = 5

Outcome = Literal["ok", "text", "router", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProgram:
    """One folder of clients/; its optional client.toml may set all fields but the folder.

    Attributes:
        is_agent: whether it runs without a network, against the models for coding agents.
    """

    folder: Path
    title: str
    models: tuple[str, ...] = ("default", "scripted")   # whose servers it runs against
    timeout_s: float = 600
    needs_torch: bool = False
    is_agent: bool = False

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one thing that a client does."""

    name: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


def client_programs(only: list[str]) -> list[ClientProgram]:
    """Return the programs of the given names, or all; raises SystemExit for an unknown name."""
    folders = {folder.name: folder for folder in sorted(FOLDER.iterdir()) if list(folder.glob("run.*"))}
    if unknown := [name for name in only if name not in folders]:
        raise SystemExit(f"unknown client {unknown[0]!r}; there are {', '.join(folders)}")
    return [_program(folder) for name, folder in folders.items() if not only or name in only]


def run_program(
    program: ClientProgram,
    environment: Environment,
    *,
    url: str,
    model: str,
    encoder: str,
    tokenizer: Path,
    log: Path,
    prefix: tuple[str, ...] = (),
) -> list[Row]:
    """Run a program against a server; a failure of the program becomes a row.

    Args:
        program: the client's program.
        environment: the environment to run it in.
        url: the URL of the server.
        model: the name of the text model.
        encoder: the name of the model of vectors.
        tokenizer: the folder of the model's tokenizer files.
        log: the file for the program's stderr.
        prefix: words before the command, as those of `loopback_network`.
    """
    home = log.parent / "home" / program.name    # clients keep settings and logs there
    home.mkdir(parents=True, exist_ok=True)
    variables = {
        name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_BASE_URL"))
    } | {
        "GENSERVE_URL": url,
        "GENSERVE_MODEL": model,
        "GENSERVE_ENCODER": encoder,
        "GENSERVE_TOKENIZER": str(tokenizer),
        "PYTHONPATH": str(FOLDER),
        "HOME": str(home),
        "NO_COLOR": "1",
    }
    if environment.programs:
        variables["PATH"] = f"{environment.programs}{os.pathsep}{variables['PATH']}"
    if program.is_agent:    # it runs `genserve launch`
        variables["PYTHONPATH"] += f"{os.pathsep}{FOLDER.parents[1]}"
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [*prefix, *environment.command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=variables,
            cwd=home,
        )
        try:
            output, _ = process.communicate(timeout=program.timeout_s)
            problem = f"exit status {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            output = _stopped(process)
            problem = f"stopped after {program.timeout_s:g} s"
    rows = [row for line in output.splitlines() if (row := _row(line)) is not None]
    if problem or not rows:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        detail = f"{problem or 'it printed no row'}: {''.join(last)}"
        seconds = time.monotonic() - begun
        rows.append(Row(name="the program", outcome="failed", detail=detail, seconds=seconds))
    return rows


def _stopped(process: subprocess.Popen[str]) -> str:
    """Stop a program, which has some seconds to end what it runs, and return what it has printed."""
    process.terminate()
    try:
        output, _ = process.communicate(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return output


def _program(folder: Path) -> ClientProgram:
    settings: dict[str, Any] = {}
    if (file := folder / "client.toml").exists():
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
        settings["models"] = tuple(settings.get("models", ("default", "scripted")))
    return ClientProgram(folder=folder, **({"title": folder.name} | settings))


def _row(line: str) -> Row | None:
    """Read one line; None: the line is not a row, but something else that a client prints."""
    try:
        read = json.loads(line)
        name, ok = read["row"], read["ok"]
    except (ValueError, KeyError, TypeError):
        return None
    outcome: Outcome = "ok" if ok else "text" if read.get("cause") == "text" else "failed"
    detail = " ".join(str(read.get("detail", "")).split())
    return Row(name=name, outcome=outcome, detail=detail, seconds=read.get("seconds", 0.0))
