"""codex: OpenAI's Codex, over Responses."""

import json
from pathlib import Path

from agents import NOTES, Agent, add_rows, call, run_command
from rows import MODEL, URL, expect, main, row

FLAGS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def words(run):
    resume = ("resume", "--last") if run.is_resumed else ()
    notes = {"command": NOTES[0], "args": NOTES[1:]} if run.has_notes else {}
    values = (f"mcp_servers.notes.{name}={json.dumps(value)}" for name, value in notes.items())
    settings = [word for value in values for word in ("-c", value)]
    return ["exec", *resume, *FLAGS, *settings, run.task]


add_rows(
    Agent(
        name="codex",
        words=words,
        write=lambda path, text: call("exec_command", cmd=f"echo '{text}' > {path}"),
        read=lambda path: call("exec_command", cmd=f"cat {path}"),
        picture=lambda path: call("view_image", path=path),
        timer_words=("-c", "model_providers.genserve.stream_idle_timeout_ms=20000"),
    )
)

@row("--oss, as with Ollama")
def _():
    # It asks Ollama's routes for the model, and pulls it if it is missing.
    folder = Path.home() / "work" / "oss"
    folder.mkdir(parents=True, exist_ok=True)
    words = ("exec", "--oss", "--local-provider=ollama", f"--model={MODEL}", *FLAGS, "Say hello.")
    code, printed = run_command(
        ["codex", *words], cwd=folder, variables={"CODEX_OSS_BASE_URL": f"{URL}/v1", "PWD": str(folder)}
    )
    expect(code == 0 and "You said: Say hello." in printed, f"{code}: {' '.join(printed.split())[-400:]}")


main()
