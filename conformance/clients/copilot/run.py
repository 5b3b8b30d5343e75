"""copilot: GitHub's Copilot CLI, over chat completions."""

import json

from agents import NOTES, Agent, add_rows, call
from rows import main


def words(run):
    server = {"type": "local", "command": NOTES[0], "args": NOTES[1:], "tools": ["*"]}
    notes = {"mcpServers": {"notes": server}}
    return [
        *(("--continue",) if run.is_resumed else ()),
        *((f"--additional-mcp-config={json.dumps(notes)}",) if run.has_notes else ()),
        "--allow-all",
        f"--prompt={run.task}",
    ]


add_rows(
    Agent(
        name="copilot",
        words=words,
        write=lambda path, text: call("create", path=path, file_text=text),
        read=lambda path: call("view", path=path),
        picture=lambda path: call("view", path=path),
        note=lambda name, **arguments: [call(f"notes-{name}", **arguments)],
        # It has no setting of a timer, so its row of a late token shows that it has none below 25 seconds.
    )
)
main()
