"""pi, over chat completions."""

import json

from agents import NOTES, Agent, add_rows, call
from rows import main


def prepare(run):
    settings = run.folder / ".pi"
    settings.mkdir(exist_ok=True)
    notes = {"notes": {"command": NOTES[0], "args": NOTES[1:], "exposure": "direct"}} if run.has_notes else {}
    (settings / "mcp.json").write_text(json.dumps({"mcpServers": notes}), encoding="utf-8")
    timers = {"httpIdleTimeoutMs": 20_000} if run.is_late else {}
    (settings / "settings.json").write_text(json.dumps(timers), encoding="utf-8")


def words(run):
    return [*(("--continue",) if run.is_resumed else ()), "--approve", "--offline", "--print", run.task]


add_rows(
    Agent(
        name="pi",
        words=words,
        write=lambda path, text: call("write", path=path, content=text),
        read=lambda path: call("read", path=path),
        picture=lambda path: call("read", path=path),
        prepare=prepare,
    )
)
main()
