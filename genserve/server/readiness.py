"""Readiness: whether the server and its models answer, asked beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from genserve.kserve.models import Models
from genserve.repository.versions import ModelState
from genserve.server.daemon_thread import start_daemon

__all__ = ["Readiness"]

T = TypeVar("T")

_WITHIN_S = 5.0


class Readiness:
    """A model may answer for itself, in code that takes its time, or never returns; it gets 5 s.

    Each question is asked once at a time, however many wait for its answer. For one event loop.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._asking: dict[object, asyncio.Future[Any]] = {}

    async def state(self) -> str:
        """Return the worst state of all models; UNAVAILABLE if that cannot be known in time."""
        return await self._ask(None, lambda: self._models.state, otherwise=ModelState.UNAVAILABLE)

    async def of_model(self, name: str, version: int) -> bool:
        """Whether a model answers; -1: its latest version."""
        return await self._ask(
            (name, version), lambda: self._models.is_ready(name, version), otherwise=False
        )

    async def _ask(self, key: object, question: Callable[[], T], *, otherwise: T) -> T:
        asking: asyncio.Future[T] | None = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = start_daemon(question, name="readiness")
            asking.add_done_callback(lambda _: self._asking.pop(key))
        done, _ = await asyncio.wait({asking}, timeout=_WITHIN_S)
        return asking.result() if done else otherwise
