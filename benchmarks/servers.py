"""Servers: run genserve, Triton and other servers, each as a context manager."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

READY_S = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(Ports):
    pid: int    # the server's process


@contextmanager
def genserve_server(
    repository: Path,
    *,
    flags: Sequence[str] = (),
    command: Sequence[str] = (sys.executable, "-m", "genserve"),
) -> Iterator[Running]:
    """Run `genserve serve` on free ports."""
    ports = _free_ports()
    serve = [*command, "serve", f"--model-repository={repository}", *flags, *_flags(ports)]
    with running(serve, ready_url=_ready_url(ports)) as pid:
        yield Running(http=ports.http, grpc=ports.grpc, metrics=ports.metrics, pid=pid)


@contextmanager
def both_checkouts(
    other: Path, repository: Path, *, flags: Sequence[str] = ()
) -> Iterator[Mapping[str, Running]]:
    """Run `genserve serve` of another checkout and of this one, as "other" and "this"."""
    os.environ["PYTHONSAFEPATH"] = "1"      # -m would prefer the genserve of the working directory
    with ExitStack() as stack:
        servers = {}
        for name, checkout in (("other", other.resolve()), ("this", Path(__file__).parents[1])):
            os.environ["PYTHONPATH"] = str(checkout)    # the processes inherit it
            servers[name] = stack.enter_context(genserve_server(repository, flags=flags))
        yield servers


def measured_in_turns(
    servers: Mapping[str, Running], measure: Callable[[Running], float], *, rounds: int
) -> dict[str, list[float]]:
    """Return the figures of each server, which are measured in turns: the machine is as busy for all."""
    figures: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, server in servers.items():
            figures[name].append(measure(server))
    return figures


@contextmanager
def triton_server(command: str, repository: Path) -> Iterator[Ports]:
    """Run Triton on free ports, by a command to which Triton's flags are appended.

    The command is `tritonserver` in Triton's container. Without a container, the package nvidia-pytriton has
    the program with the Python backend.
    """
    ports = _free_ports()
    program = [*shlex.split(command), f"--model-repository={repository}", *_flags(ports)]
    with running(program, ready_url=_ready_url(ports)):
        yield ports


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far; Linux only."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _ready_url(ports: Ports) -> str:
    return f"http://127.0.0.1:{ports.http}/v2/health/ready"


def _flags(ports: Ports) -> list[str]:
    return [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}"]


@contextmanager
def running(command: Sequence[str], *, ready_url: str) -> Iterator[int]:
    """Run a server until the block ends; yield its process id once `ready_url` answers with a success."""
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        environment = {"PYTHONFAULTHANDLER": "1", **os.environ}     # a crash shows its stacks
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait(process, ready_url, log)
            yield process.pid
        finally:
            if process.poll() is not None:
                print(f"the server ended with {process.returncode}:\n{_end_of(log)}", file=sys.stderr)
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], ready_url: str, log: IO[str]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args} ended with {process.returncode}:\n{_end_of(log)}")
        try:
            with urllib.request.urlopen(ready_url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise SystemExit(f"{process.args} was not ready in {READY_S} s:\n{_end_of(log)}")


def _end_of(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-12_000:]


def _free_ports() -> Ports:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    http, grpc, metrics = (listener.getsockname()[1] for listener in listeners)
    for listener in listeners:
        listener.close()
    return Ports(http=http, grpc=grpc, metrics=metrics)
