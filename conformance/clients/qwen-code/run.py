"""qwen-code, over chat completions."""

import json

from agents import NOTES, Agent, add_rows, call
from rows import main


def words(run):
    notes = {"mcpServers": {"notes": {"command": NOTES[0], "args": NOTES[1:], "trust": True}}}
    return [
        *(("--continue",) if run.is_resumed else ()),
        *((f"--mcp-config={json.dumps(notes)}",) if run.has_notes else ()),
        "--yolo",
        f"--prompt={run.task}",
    ]


def note(name, **arguments):
    tool = f"mcp__notes__{name}"    # deferred, and called by another tool
    return [call("tool_search", query=f"select:{tool}"), call("tool_call", name=tool, arguments=arguments)]


add_rows(
    Agent(
        name="qwen",
        words=words,
        write=lambda path, text: call("write_file", file_path=path, content=text),
        read=lambda path: call("read_file", file_path=path),
        picture=lambda path: call("read_file", file_path=path),
        note=note,
        # Its timer counts chunks of the answer, not the comments that the server sends meanwhile. So launch
        # raises it instead, and the row of a late token has the timer that launch sets.
    )
)
main()
