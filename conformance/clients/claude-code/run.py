"""claude-code: Anthropic's Claude Code, over Messages."""

import json
from pathlib import Path

from agents import NOTES, Agent, Run, add_rows, call
from rows import expect, main, row


def words(run):
    notes = {"mcpServers": {"notes": {"command": NOTES[0], "args": NOTES[1:]}}}
    return [
        *(("--continue",) if run.is_resumed else ()),
        *((f"--mcp-config={json.dumps(notes)}",) if run.has_notes else ()),
        "--allowedTools=Write,Read,Bash,mcp__notes",
        "--print",
        run.task,
    ]


def note(name, **arguments):
    tool = f"mcp__notes__{name}"    # deferred: its schema is not in the prompt before a search
    return [call("ToolSearch", query=f"select:{tool}"), call(tool, **arguments)]


AGENT = Agent(
    name="claude",
    words=words,
    write=lambda path, text: call("Write", file_path=path, content=text),
    # After it has compacted a conversation, it adds the files that it knows to have read.
    read=lambda path: call("Bash", command=f"awk 1 {path}", description="Read a file"),
    picture=lambda path: call("Read", file_path=path),
    note=note,
    timers={"CLAUDE_ENABLE_BYTE_WATCHDOG": "1", "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": "20000"},
)
add_rows(AGENT)


@row("/context, which counts tokens")
def _():
    printed = AGENT.run(Run(task="/context", folder=Path.home() / "work" / "context"))
    expect("Context Usage" in printed, f"{' '.join(printed.split())[-400:]}")


main()
