"""Router programs: run the routers in the folders of routers/ in front of several servers.

router.toml has the router's command and arguments, to which the address and the servers are added, and the
router's limits: the rows that fail because of it, with the reason.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from conformance.client_programs import Row
from conformance.environments import Environment

FOLDER = Path(__file__).with_name("routers")
NUM_SERVERS = 3
_START_S = 60
_CHAT = {"messages": [{"role": "user", "content": "Say hello to Ada."}], "max_tokens": 16, "temperature": 0}
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
# The fields that differ between two answers to the same request.
_VARYING = ("id", "created", "request_id", "timings")


class RouterFailed(Exception):
    """The router did not start; the message is the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterProgram:
    """One folder of routers/."""

    folder: Path
    command: str
    arguments: tuple[str, ...]
    limits: Mapping[str, str]   # reasons, by the names of rows

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name

    def with_limits(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows, with the reason in rows that fail because of the router."""
        return [
            replace(row, outcome="router", detail=self.limits[row.name])
            if row.outcome == "failed" and row.name in self.limits
            else row
            for row in rows
        ]


def router_program(name: str) -> RouterProgram:
    """Return the router of a folder; raises SystemExit for an unknown name."""
    names = sorted(folder.name for folder in FOLDER.iterdir())
    if name not in names:
        raise SystemExit(f"unknown router {name!r}; there are {', '.join(names)}")
    settings: dict[str, Any] = tomllib.loads((FOLDER / name / "router.toml").read_text(encoding="utf-8"))
    return RouterProgram(
        folder=FOLDER / name,
        command=settings["command"],
        arguments=tuple(settings["arguments"]),
        limits=settings["limits"],
    )


@contextmanager
def running_router(
    program: RouterProgram, environment: Environment, *, servers: Sequence[str], log: Path
) -> Iterator[str]:
    """Run a router in front of servers, and yield its URL.

    Args:
        program: the router to run.
        environment: the environment in which the router is installed.
        servers: the URLs of the servers.
        log: the file for the router's output.

    Raises:
        RouterFailed: the router ended, or was not healthy within a minute.
    """
    port, metrics_port = _free_ports(2)
    command = [
        str(Path(environment.command[0]).with_name(program.command)),
        *program.arguments,
        "--host=127.0.0.1", f"--port={port}", f"--prometheus-port={metrics_port}",
        "--worker-urls", *servers,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with log.open("w", encoding="utf-8") as output, subprocess.Popen(
        command, stdout=output, stderr=output, cwd=log.parent
    ) as process:
        try:
            _wait_until_healthy(url, process, log=log)
            yield url
        finally:
            process.terminate()


def compared(url: str, server: str, *, model: str) -> list[Row]:
    """Return rows that fail where a router answers differently from a server behind it.

    Args:
        url: the URL of the router.
        server: the URL of one of its servers.
        model: the name of the text model.
    """
    chat, completion = "/v1/chat/completions", "/v1/completions"
    prompt = {"model": model, "prompt": "The sea is", "max_tokens": 16, "temperature": 0}
    requests: Mapping[str, tuple[str, str, Any]] = {
        "chat": ("POST", chat, _CHAT | {"model": model}),
        "chat, streamed": ("POST", chat, _CHAT | _STREAM | {"model": model}),
        "completion": ("POST", completion, prompt),
        "completion, streamed": ("POST", completion, prompt | _STREAM),
        "error of a field": ("POST", chat, _CHAT | {"model": model, "temperature": -1}),
        "error of a model": ("POST", chat, _CHAT | {"model": "no-such-model"}),
    }
    rows = []
    for name, (method, path, body) in requests.items():
        begun = time.monotonic()
        seen = [_answer(base, method, path, body) for base in (url, server)]
        detail = "" if seen[0] == seen[1] else f"{seen[0]} instead of {seen[1]}"
        rows.append(
            Row(
                name=f"as the server: {name}",
                outcome="failed" if detail else "ok",
                detail=detail,
                seconds=round(time.monotonic() - begun, 2),
            )
        )
    return rows


def _answer(base: str, method: str, path: str, body: Any) -> tuple[int, str, list[Any]]:
    """Return the status, content type and content of an answer, without the fields that vary.

    A busy server sends several tokens, and the reason of the end, in one event, so events of a stream that
    differ in their choices only are one, and their choices are merged.
    """
    response = httpx2.request(method, base + path, json=body, timeout=60)
    content_type = response.headers.get("content-type", "").partition(";")[0]
    if content_type != "text/event-stream":
        return response.status_code, content_type, [_steady(response.text)]
    events: list[Any] = []
    choice: dict[str, Any] = {}
    for line in response.text.split("\n\n"):
        event = _steady(line.removeprefix("data: "))
        if isinstance(event, dict):
            for part in event.pop("choices", ()):
                _merge(choice, part)
        if event not in events:
            events.append(event)
    return response.status_code, content_type, [*events, choice]


def _steady(text: str) -> Any:
    """Return an answer or the data of an event without the fields that vary."""
    try:
        read = json.loads(text)
    except ValueError:
        return text
    kept = {name: value for name, value in read.items() if name not in _VARYING}
    if isinstance(kept.get("usage"), dict):
        # Cached and drafted tokens depend on what the server does besides.
        kept["usage"] = {**kept["usage"], "prompt_tokens_details": None, "completion_tokens_details": None}
    return kept


def _merge(choice: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a part of a streamed choice: its texts are appended, other values replace those before."""
    for name, value in part.items():
        if isinstance(value, dict):
            _merge(choice.setdefault(name, {}), value)
        elif isinstance(value, str) and name in ("content", "text"):
            choice[name] = choice.get(name, "") + value
        elif value is not None:
            choice[name] = value


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], *, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx2.get(f"{url}/readiness").status_code == 200:
                return
        except httpx2.TransportError:
            pass    # the router does not listen yet
        time.sleep(0.2)
    raise RouterFailed(f"the router did not start:\n{log.read_text(encoding='utf-8')[-2000:]}")


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
