"""Wakeup: lets a thread wake the one thread that waits."""

from __future__ import annotations

import os
import select

__all__ = ["Wakeup"]


class Wakeup:
    """Each `ring` is heard by one `wait`, before or after it. Any thread rings, one waits.

    A pipe, and not a lock: to write to it gives up the interpreter's lock, so that whoever is woken runs at
    once. A lock that is released wakes a thread which finds the interpreter taken and sleeps again; on two
    cores a call and its answer by two pipes take a quarter of the time that they take by two locks.
    """

    def __init__(self) -> None:
        self._hears, self._rings = os.pipe()
        poll = select.poll()
        poll.register(self._hears, select.POLLIN)
        self._poll = poll.poll

    def ring(self) -> None:
        """Let one wait end."""
        os.write(self._rings, b"!")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is rung; False: the time is over."""
        if timeout_s is not None and not self._poll(timeout_s * 1000):
            return False
        os.read(self._hears, 1)
        return True

    def __del__(self) -> None:
        os.close(self._hears)
        os.close(self._rings)
