"""Agents: the rows that coding agents share. Each runs by `genserve launch`, with the settings of that.

The scripted model for agents does what a task says, `use the tool write({"path": "hello.txt"})`, one call per
turn, and then says what the last tool said. A row gives the agent a task for its own tools, in an own folder.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

from notes_server import picture
from rows import MODEL, URL, expect, row

STRICT, SMALL = f"{MODEL}_strict", f"{MODEL}_24k"
NOTES = (sys.executable, str(Path(__file__).with_name("notes_server.py")))
_NUM_PARTS = 20
_TIMEOUT_S = 480


@dataclass(kw_only=True)
class Run:
    """One run of an agent: its task, and what it is given beside the settings of `genserve launch`."""

    task: str
    model: str = MODEL
    has_notes: bool = False     # whether it has the MCP server
    is_resumed: bool = False    # whether it goes on with the last session of its folder
    is_late: bool = False       # whether the first token takes 25 seconds
    folder: Path = field(default_factory=Path)


@dataclass(kw_only=True)
class Agent:
    """What the rows need to know about an agent.

    Attributes:
        name: its name for `genserve launch`.
        words: returns the arguments of a run without a terminal.
        write: returns the call that writes a text to a path.
        read: returns the call that reads a file.
        note: returns the calls of a tool of the MCP server; an agent may have to search it first.
        prepare: writes the agent's files to the folder of a run.
        timers: variables that lower the timer of a silent server below 25 seconds.
        timer_words: arguments that do; `prepare` may do it too.
        picture: returns the call of its own tool that looks at a picture.
    """

    name: str
    words: Callable
    write: Callable
    read: Callable
    picture: Callable
    note: Callable = lambda name, **arguments: [call(f"mcp__notes__{name}", **arguments)]
    prepare: Callable = lambda run: None
    timers: dict = field(default_factory=dict)
    timer_words: tuple = ()

    def run(self, run, *, words=(), variables=None):
        """Run the agent, and return what it printed; fails if it ends with an error."""
        run.folder.mkdir(parents=True, exist_ok=True)
        self.prepare(run)
        launch = ["genserve", "launch", self.name, f"--model={run.model}", f"--url={URL}"]
        print(f"=== {run}", file=sys.stderr, flush=True)
        code, printed = run_command(
            [sys.executable, "-m", *launch, "--", *words, *self.words(run)],
            cwd=run.folder,
            # As from a shell, whose PWD is where opencode works.
            variables={"GENSERVE_HOME": str(Path.home() / "genserve"), "PWD": str(run.folder)}
            | (variables or {}),
        )
        expect(code == 0, f"exit status {code}: {' '.join(printed.split())[-400:]}")
        return printed


def run_command(command, *, cwd, variables, timeout_s=_TIMEOUT_S):
    """Run a command to its end, and end what it has left running.

    Returns:
        its exit status, and what it printed, which also goes to standard error.
    """
    # Files, since a process that outlives the command would keep a pipe open.
    with _text_file() as out, _text_file() as err:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,     # so that the agent and its tools are one group
        )
        try:
            code = process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for file in (out, err):
                file.seek(0)
            printed = f"{out.read()}\n{err.read()}"
            print(printed, file=sys.stderr, flush=True)
    return code, printed


def _prompt_tokens():
    """The tokens of all prompts so far, and how many of them the server found in its prefix cache."""
    with urlopen(f"{URL}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    names = ("genserve_prefix_cache_queries_total", "genserve_prefix_cache_hits_total")
    return [sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names]


def _text_file():
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def call(tool, /, **arguments):
    """The words of a task that name a call."""
    return f"use the tool {tool}({json.dumps(arguments)})"


def add_rows(agent):
    """Make the rows of an agent."""
    folders = Path.home() / "work"

    def task(name, *calls, before="", **given):
        return Run(task=f"{before}{', then '.join(calls)}.", folder=folders / name, **given)

    def hello(run, **options):
        file = run.folder / "hello.txt"
        file.unlink(missing_ok=True)
        printed = agent.run(run, **options)
        expect(file.exists(), f"no hello.txt: {' '.join(printed.split())[-400:]}")
        expect("Hello, world" in file.read_text(encoding="utf-8"), "hello.txt has another text")
        expect_said(printed)

    def write(folder):
        return agent.write(str(folders / folder / "hello.txt"), "Hello, world")

    @row("a task by its tools")
    def _():
        hello(task("defaults", write("defaults")))

    @row("resumes a session, from the prefix cache")
    def _():
        run = task("defaults", write("defaults"))
        run.task, run.is_resumed = "What did the tool say?", True
        before = _prompt_tokens()
        expect_said(agent.run(run))
        num_read, num_cached = (end - begin for begin, end in zip(before, _prompt_tokens(), strict=True))
        # qwen-code asks for something else besides.
        expect(num_cached > 0.5 * num_read, f"{num_cached:.0f} of {num_read:.0f} tokens were cached")

    @row("an MCP server")
    def _():
        run = task("notes", *agent.note("write_note", text="Rome is sunny."), has_notes=True)
        notes = run.folder / "notes.txt"
        notes.unlink(missing_ok=True)
        printed = agent.run(run)
        expect(notes.exists(), f"no note: {' '.join(printed.split())[-400:]}")
        expect_said(printed, "noted: Rome is sunny.")

    @row("an image from an MCP server")
    def _():
        expect_said(agent.run(task("picture", *agent.note("show_picture"), has_notes=True)))

    @row("an image from its own tool")
    def _():
        run = task("image", agent.picture(str(folders / "image" / "red.png")))
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "red.png").write_bytes(picture())
        expect_said(agent.run(run))

    @row("a context of 24k that fills")
    def _():
        folder = folders / "long"
        folder.mkdir(parents=True, exist_ok=True)
        calls = [write("long")]
        for number in range(2, _NUM_PARTS + 1):
            part = folder / f"part{number}.txt"
            part.write_text(f"({number} calls are done)\n" + "all work and no play\n" * 225, encoding="utf-8")
            calls.append(agent.read(str(part)))
        hello(task("long", *calls, model=SMALL))

    @row("a template that wants the system message first")
    def _():
        hello(task("strict", write("strict"), model=STRICT))

    @row("a first token after 25 seconds")
    def _():
        # With a timer of 20 seconds, which the server has to reset, where an agent has one that it can.
        run = task("late", write("late"), before="wait 25 seconds, then ", is_late=True)
        hello(run, words=agent.timer_words, variables=agent.timers)


def expect_said(printed, text=""):
    """Fail the row unless the agent shows the last answer."""
    expect("The tool says:" in printed, f"no answer: {' '.join(printed.split())[-400:]}")
    expect(text in printed, f"the answer lacks {text!r}: {' '.join(printed.split())[-400:]}")
