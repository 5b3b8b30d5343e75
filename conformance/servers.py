"""Servers: run `genserve serve` or `genserve deploy ray` on free local ports, or behind a recording proxy."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


class ServerFailed(Exception):
    """The server did not start; the message is the end of its log."""


@contextmanager
def running_server(
    repository: Path, *, log: Path, num_replicas: int = 0, prefix: tuple[str, ...] = ()
) -> Iterator[str]:
    """Serve a model repository, and yield the URL.

    Args:
        repository: the folder of the repository.
        log: the file for the server's output.
        num_replicas: the number of replicas per model, on a Ray cluster of this machine; 0: a single server.
        prefix: words before the command, as those of `loopback_network`.

    Raises:
        ServerFailed: the server ended before it was ready.
    """
    words = ["deploy", "ray", f"--min-replicas={num_replicas}", f"--port={_free_port()}"]
    command = [*prefix, sys.executable, "-m", "genserve"]
    command += words if num_replicas else ["serve", *_FREE_PORTS]
    command.append(f"--model-repository={repository}")
    pipe = subprocess.PIPE
    with (
        log.open("w", encoding="utf-8") as output,
        subprocess.Popen(command, stdout=pipe, stderr=output, text=True, cwd=log.parent) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if ready := re.match(r"Ready at (\S+)", line):
                    break
            else:
                raise ServerFailed(f"the server of {repository} did not start:\n{log.read_text()[-2000:]}")
            rest = threading.Thread(target=process.stdout.read, daemon=True)
            rest.start()    # a full pipe would block the server
            yield ready[1]
        finally:
            process.send_signal(signal.SIGINT)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def recorded(url: str, file: Path) -> Iterator[str]:
    """Yield a URL that forwards to `url`, and write all bytes of both directions to a file."""
    target = int(url.rpartition(":")[2])
    lock = threading.Lock()
    with socket.create_server(("127.0.0.1", 0)) as listener, file.open("wb") as record:

        def forward(source: socket.socket, sink: socket.socket, mark: bytes) -> None:
            _forward(source, sink, mark=mark, record=record, lock=lock)

        def accept() -> None:
            number = 0
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:     # the connection was closed
                    return
                number += 1
                server = socket.create_connection(("127.0.0.1", target))
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for source, sink, arrow in ((client, server, "->"), (server, client, "<-")):
                    mark = f"\n=== {number} {arrow}\n".encode()
                    threading.Thread(target=forward, args=(source, sink, mark), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _forward(
    source: socket.socket, sink: socket.socket, *, mark: bytes, record: BinaryIO, lock: threading.Lock
) -> None:
    try:
        while data := source.recv(2**16):
            with lock:
                record.write(mark + data)
                record.flush()
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except (OSError, ValueError):   # a side has closed its connection, or the recording has ended
        for end in (source, sink):
            end.close()
