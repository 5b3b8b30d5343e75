"""opencode, over chat completions."""

import json

from agents import NOTES, Agent, add_rows, call
from rows import main


def prepare(run):
    # By default it goes on without a server that takes more than 5 seconds to start.
    notes = {"notes": {"type": "local", "command": NOTES, "timeout": 60_000}} if run.has_notes else {}
    config = {"mcp": notes, "permission": "allow"}
    if run.is_late:
        config["provider"] = {"genserve": {"options": {"headerTimeout": 20_000, "chunkTimeout": 20_000}}}
    (run.folder / "opencode.json").write_text(json.dumps(config), encoding="utf-8")


def words(run):
    return ["run", *(("--continue",) if run.is_resumed else ()), run.task]


add_rows(
    Agent(
        name="opencode",
        words=words,
        write=lambda path, text: call("write", filePath=path, content=text),
        read=lambda path: call("read", filePath=path),
        picture=lambda path: call("read", filePath=path),
        note=lambda name, **arguments: [call(f"notes_{name}", **arguments)],
        prepare=prepare,
    )
)
main()
