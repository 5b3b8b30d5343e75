"""Loopback: a network namespace that has loopback only, in which a server and coding agents run.

An agent that contacted anything but the server would fail there, instead of sending something away.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_HOLD = "ip link set lo up && echo ready && exec cat"    # cat ends with its standard input, and so with us
# Root may make a namespace; others may in a user namespace of their own, where the system allows that.
_WAYS = (((), ()), (("--map-root-user",), ("--user", "--preserve-credentials")))


class NoLoopback(Exception):
    """The system allows no network namespace here; the message says why."""


@contextmanager
def loopback_network() -> Iterator[tuple[str, ...]]:
    """Make a namespace, and yield the words that begin a command which runs in it.

    Raises:
        NoLoopback: the system allows none.
    """
    problem = ""
    for to_make, to_enter in _WAYS:
        pipe = subprocess.PIPE
        command = ["unshare", *to_make, "--net", "sh", "-c", _HOLD]
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        except FileNotFoundError:
            raise NoLoopback("there is no program `unshare`, which Linux has") from None
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            if process.stdout.readline() == "ready\n":
                yield "nsenter", f"--target={process.pid}", "--net", *to_enter, "--"
                process.stdin.close()
                return
            problem = process.stderr.read().strip()
    raise NoLoopback(problem)
