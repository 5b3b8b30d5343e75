"""Model context: what the code of one instance of a Python model can reach in its server."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from genserve.backends.python.custom_metrics import MetricFamilies
from genserve.inference import Executor, InferenceServer

__all__ = ["CONTEXT_GLOBAL", "CURRENT_CONTEXT", "Host", "Phase", "current_context"]


class Phase(Enum):
    """Where in its life an instance is."""

    STARTING = "starting"
    RUNNING = "running"
    CLOSING = "closing"


@dataclass(slots=True, kw_only=True, eq=False)
class Host:
    """One instance of a python model, for what its code calls.

    Attributes:
        model: its name.
        instance: the name of the instance; empty while a config is completed, when there is none.
        folder: of the version.
        package: that its modules are in; empty before they are imported.
        server: runs all models; None while a config is completed.
        families: of its own metrics; None: they are not supported.
        decoupled: whether it answers by senders alone.
        outputs: that its config declares; whoever asks for none asks for these.
        executor: the instance, as requests see it; None: outside of a server.
        cpu_inputs: whether inputs are brought to the CPU before it sees them.
        phase: BLS is legal while it runs.
    """

    model: str
    instance: str = ""
    folder: Path
    package: str = ""
    server: InferenceServer | None = None
    families: MetricFamilies | None = None
    decoupled: bool = False
    outputs: tuple[str, ...] = ()
    executor: Executor | None = None
    cpu_inputs: bool = True
    phase: Phase = Phase.STARTING


# Set on the thread of the instance; asyncio tasks inherit it.
CURRENT_CONTEXT: ContextVar[Host | None] = ContextVar("current_context", default=None)

# The global by which each module of an instance knows its host.
CONTEXT_GLOBAL = "__genserve_host__"


def current_context() -> Host | None:
    """Return the host of the model that calls; None: no model does, as in a user's own test.

    Threads that a model starts inherit no context, so the modules on the stack are asked in their place.
    """
    host = CURRENT_CONTEXT.get()
    if host is not None:
        return host
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_globals.get(CONTEXT_GLOBAL)
        if isinstance(found, Host):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None
