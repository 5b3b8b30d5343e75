"""The command `genserve launch`: runs a coding agent with a model, or prints the commands that do."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from genserve.cli.agents import AGENTS, KEY, Agent, AgentModel, AgentSettings
from genserve.cli.completion_command import model_names
from genserve.cli.flags import RemoteServer, RepositoryFlags, server_flag
from genserve.cli.parser import UsageError
from genserve.errors import GenserveError
from genserve.settings import Flag, flag
from genserve.store import home_folder

# The context length to assume of a server that does not report it.
_UNKNOWN_MAX_LENGTH = 32768


@dataclass(frozen=True, kw_only=True)
class LaunchFlags(RepositoryFlags):
    """The flags of `genserve launch`."""

    agent: Literal["codex", "claude", "opencode", "qwen", "copilot", "pi"] = flag(
        MISSING, Flag(help="The agent.", is_argument=True)
    )
    arguments: list[str] = flag(list, Flag(help="Arguments of the agent, after --.", is_argument=True))
    model: str | None = flag(
        None,
        Flag(
            help="Default: the only model of the server or of the repository, or else smollm2.",
            variable="GENSERVE_MODEL",
            complete=model_names,
        ),
    )
    print_: bool = flag(
        False,
        Flag(help="Print shell commands instead of running the agent; needs --url.", names=("--print",)),
    )
    url: str | None = flag(
        None,
        server_flag(
            help="Use the server at this URL, with the key in GENSERVE_API_KEY, instead of starting one.",
            variable="GENSERVE_BASE_URL",
        ),
    )


def launch(flags: LaunchFlags) -> None:
    """Run a coding agent with a model. The settings are for this session: your own files stay as they are.

    Without --url, a server is started for the model, and ends with the agent. A missing model is pulled.
    """
    agent = AGENTS[flags.agent]
    if flags.print_ and flags.url is None:
        raise UsageError("--print needs --url", remedy="the URL that `genserve serve` prints")
    if not flags.print_ and shutil.which(agent.program) is None:
        raise GenserveError(
            f"{agent.title} is not installed: there is no program {agent.program!r}",
            remedy=f"npm install --global {agent.package}",
        )
    opening: AbstractContextManager[tuple[str, str | None]]
    if flags.url:
        opening = nullcontext((flags.url, flags.model))
    else:
        opening = _started_server(flags.model, flags.model_repository)
    with opening as (url, name):
        model = _served_model(url, name=name)
        settings = agent.settings(model, home_folder() / "agents")
        if flags.print_:
            print(shell_commands(agent, settings, arguments=flags.arguments), end="")
            return
        code = _run(agent, settings, arguments=flags.arguments)
    raise SystemExit(code)


def shell_commands(agent: Agent, settings: AgentSettings, *, arguments: Sequence[str] = ()) -> str:
    """Return the lines that run an agent from a shell."""
    lines = [f"export {name}={_quoted(value)}" for name, value in settings.variables.items()]
    for path, text in settings.files.items():
        lines += [f"mkdir -p {shlex.quote(str(path.parent))}", f"cat > {shlex.quote(str(path))} <<'END'"]
        lines += [text.rstrip("\n"), "END"]
    lines.append(shlex.join([agent.program, *settings.arguments, *arguments]))
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    return f'"{value}"' if value == KEY else shlex.quote(value)


def _served_model(url: str, *, name: str | None) -> AgentModel:
    from genserve.cli.model_choice import choose_remote

    with RemoteServer(url=url, verify=True).client() as client:
        cards = client.model_cards()
    chosen = choose_remote(name, list(cards))
    max_length = cards[chosen].max_length or _UNKNOWN_MAX_LENGTH
    return AgentModel(url=url.rstrip("/"), name=chosen, max_length=max_length)


def _run(agent: Agent, settings: AgentSettings, *, arguments: Sequence[str]) -> int:
    """Run the agent to its end, and return its exit status."""
    for path, text in settings.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    key = os.environ.get("GENSERVE_API_KEY") or "none"
    variables = {name: key if value == KEY else value for name, value in settings.variables.items()}
    # Ctrl-C is the agent's. It does not inherit a handler, as it would that the signal is ignored.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        command = [agent.program, *settings.arguments, *arguments]
        done = subprocess.run(command, env=os.environ | variables, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


@contextmanager
def _started_server(name: str | None, repository: Path | None) -> Iterator[tuple[str, str]]:
    """Serve a model on a free port, and yield the URL and the model's name, which for ORG/NAME is another.

    Raises:
        GenserveError: there is no such model, or the server did not start.
    """
    from genserve.cli.console import make_console
    from genserve.cli.model_choice import bring_model

    folder, name = bring_model(name, repository=repository)
    log = home_folder() / "agents" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "genserve", "serve", name, f"--model-repository={folder}"]
    command += ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))   # end the server too
    with (
        log.open("w", encoding="utf-8") as errors,
        # In a session of its own, since Ctrl-C in the terminal is the agent's.
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as process,
    ):
        try:
            with make_console(stderr=True).status(f"loading {name}"):
                url = _read_url(process, log=log)
            yield url, name
        finally:
            process.terminate()
            signal.signal(signal.SIGTERM, before)


def _read_url(process: subprocess.Popen[str], *, log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if ready := re.match(r"Ready at (\S+)", line):
            # A full pipe would block the server.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return ready[1]
    last = "".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:])
    raise GenserveError(f"the server did not start: {last}", remedy=f"its log is {log}")
