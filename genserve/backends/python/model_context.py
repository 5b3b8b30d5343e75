"""Model context: the parts of its server that the code of one instance of a Python model can reach."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from genserve.backends.python.custom_metrics import CustomMetrics
from genserve.inference import Executor, Inference, InferenceServer, common_share
from genserve.request_context import KeyShare


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
        folder: the version's folder.
        package: name of the package of its modules; empty before they are imported.
        server: runs all models; None while a config is completed.
        metrics: custom metrics of the server; None: not supported.
        decoupled: whether it responds only through response senders.
        outputs: the outputs that its config declares; returned to requests that name no outputs.
        executor: the instance, as requests see it; None outside of a server.
        cpu_inputs: whether inputs are copied to the CPU.
        phase: BLS is allowed while it is RUNNING.
        batch: the batch that `execute` runs; None: it runs none.
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
    batch: RunningBatch | None = None


class RunningBatch:
    """A batch that a model executes, and its BLS requests, which are cancelled with it. From any thread."""

    __slots__ = ("_calls", "_inferences", "_is_watched", "_share")

    def __init__(self, inferences: Sequence[Inference]) -> None:
        """Begin without BLS requests."""
        self._inferences = inferences
        self._calls: set[Inference] = set()
        self._is_watched = False
        self._share: KeyShare | None = None     # None: nothing has asked for it

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more: each of its requests was cancelled or has ended."""
        return all(one.cancelled or one.ended for one in self._inferences)

    def add(self, call: Inference) -> None:
        """Give a BLS request, which is not submitted yet, the batch's key, and cancel it with the batch.

        If the batch is cancelled already, the model cleans up after it, and the request runs.
        """
        if self._share is None:
            self._share = common_share(self._inferences)
        call.share = self._share
        calls = self._calls
        calls.add(call)     # first, as the batch may be cancelled on another thread at any moment
        first = self._inferences[0]     # alone, it shows of nearly every batch that it is not cancelled
        if (first.cancelled or first.ended) and self.is_cancelled:
            calls.discard(call)
            return
        call.when_ended(calls.discard)
        if not self._is_watched:
            self._is_watched = True
            for inference in self._inferences:
                inference.when_cancelled(self._cancel_calls)

    def remove(self, call: Inference) -> None:
        """Forget a BLS request that was rejected."""
        self._calls.discard(call)

    def _cancel_calls(self) -> None:
        if self.is_cancelled:
            for call in tuple(self._calls):
                call.cancel()


# Set on the thread of the instance; asyncio tasks inherit it.
CURRENT_CONTEXT: ContextVar[ModelContext | None] = ContextVar("current_context", default=None)

# The batch whose `execute` runs the current code; asyncio tasks inherit it.
CURRENT_BATCH: ContextVar[RunningBatch | None] = ContextVar("current_batch", default=None)

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
