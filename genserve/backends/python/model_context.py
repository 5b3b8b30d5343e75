"""Model context: the parts of its server that the code of one instance of a Python model can reach."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from genserve.backends.python.custom_metrics import CustomMetrics
from genserve.inference import Executor, InferenceServer


class Phase(Enum):
    """The phase in the life of an instance."""

    STARTING = "starting"
    RUNNING = "running"
    CLOSING = "closing"


@dataclass(slots=True, kw_only=True, eq=False)
class ModelContext:
    """One instance of a Python model, as seen by the functions that its code calls.

    Attributes:
        model: the name of the model.
        instance: the name of the instance; empty while a config is completed.
        folder: of the version.
        package: name of the package of its modules; empty before they are imported.
        server: runs all models; None while a config is completed.
        metrics: custom metrics of the server; None: not supported.
        decoupled: whether it responds only through response senders.
        outputs: of its config; returned to requests that name no outputs.
        executor: the instance, as requests see it; None outside of a server.
        cpu_inputs: whether inputs are copied to the CPU.
        phase: BLS is allowed while it is RUNNING.
    """

    model: str
    instance: str = ""
    folder: Path
    package: str = ""
    server: InferenceServer | None = None
    metrics: CustomMetrics | None = None
    decoupled: bool = False
    outputs: tuple[str, ...] = ()
    executor: Executor | None = None
    cpu_inputs: bool = True
    phase: Phase = Phase.STARTING


# Set on the thread of the instance; asyncio tasks inherit it.
CURRENT_CONTEXT: ContextVar[ModelContext | None] = ContextVar("current_context", default=None)

# The global of each module of an instance that holds its context.
CONTEXT_GLOBAL = "__genserve_context__"


def current_context() -> ModelContext | None:
    """Return the context of the calling model; None outside of a server, as in a test of a model.py.

    Threads that a model starts do not inherit it, so the globals of the modules on the stack are searched.
    """
    context = CURRENT_CONTEXT.get()
    if context is not None:
        return context
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_globals.get(CONTEXT_GLOBAL)
        if isinstance(found, ModelContext):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None
