"""Inference: a request with named tensors on its way through a model, until its last response."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Protocol, TypeAlias

from genserve.errors import Closed, GenserveError, InferenceError, Status
from genserve.tensor import Tensor
from genserve.tracing import Span

__all__ = [
    "CURRENT_EXECUTOR",
    "Backlog",
    "Executor",
    "Inference",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceServer",
    "OnResponse",
    "Parameter",
    "RequestFlags",
    "with_request_id",
]

Parameter: TypeAlias = bool | int | float | str


class RequestFlags(IntFlag):
    """Where a request stands in its sequence; the bits are Triton's."""

    NONE = 0
    SEQUENCE_START = 1
    SEQUENCE_END = 2


# Requests and responses are not changed, and still not frozen: that takes 1 us of each call.
@dataclass(slots=True, kw_only=True)
class InferenceRequest:
    """What is asked of one model, as every protocol and BLS say it; never changed."""

    model_name: str
    model_version: int = -1                             # -1: the highest that is ready
    id: str = ""
    inputs: Mapping[str, Tensor]
    requested_outputs: tuple[str, ...] = ()             # empty: all of them
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    correlation_id: int | str = 0                       # of its sequence; 0 or "": it is in none
    flags: RequestFlags = RequestFlags.NONE
    priority: int = 0                                   # 1 is the highest; 0: the model's default
    timeout_us: int = 0                                 # in the queue; 0: no limit of its own
    cause: Span | None = None                           # of the trace that it is part of; None: of none


@dataclass(slots=True, kw_only=True)
class InferenceResponse:
    """One answer to a request, never changed; a decoupled model gives any number of them."""

    outputs: tuple[Tensor, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    error: GenserveError | None = None                  # if there is one, the outputs mean nothing

    def output(self, name: str) -> Tensor | None:
        """Return the output of this name; None: there is none."""
        return next((tensor for tensor in self.outputs if tensor.name == name), None)


# Called once for each response and once with `final`, which may come with the last response or alone (None).
# On whichever thread the model answers from; it must not block and must not raise.
OnResponse: TypeAlias = Callable[[InferenceResponse | None, bool], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Executor:
    """Who executes: an instance of a model, seen from the requests that need it.

    Attributes:
        name: of the instance.
        executing: the batch it has in hand; empty: it is free.
        waiting_for: the inferences whose answers it waits for, by BLS.
        blocked_by: tells who keeps it from executing: those that hold a resource that it needs, or stand in
            line for it before this one.
    """

    name: str
    executing: Sequence[Inference] = ()
    waiting_for: set[Inference] = field(default_factory=set, repr=False)
    blocked_by: Callable[[], Sequence[Executor]] = field(default=tuple, repr=False)


# The instance whose `execute` the code runs in.
CURRENT_EXECUTOR: ContextVar[Executor | None] = ContextVar("current_executor", default=None)


class Backlog:
    """What was made of the responses to an inference and waits for room further on. Safe from any thread.

    Whoever answers waits while there is any: this is how an ensemble holds up a step that is too fast.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Inference] = []
        self._when_clear: list[Callable[[], None]] = []
        self._lifted = False

    @property
    def waiting(self) -> Sequence[Inference]:
        """What waits, the first first."""
        return tuple(self._waiting)

    def add(self, inference: Inference) -> None:
        """Let whoever answers wait for this one, too."""
        with self._lock:
            if not self._lifted:
                self._waiting.append(inference)

    def remove(self, inference: Inference) -> None:
        """Wait for this one no more; what was added twice is waited for once more."""
        with self._lock:
            if inference in self._waiting:
                self._waiting.remove(inference)
        self._call_back_if_clear()

    def lift(self) -> None:
        """Hold up nobody any more, whatever waits: it would wait for ever."""
        with self._lock:
            self._lifted = True
            self._waiting.clear()
        self._call_back_if_clear()

    def when_clear(self, callback: Callable[[], None]) -> None:
        """Call back once nothing waits: at once if that is so."""
        with self._lock:
            self._when_clear.append(callback)
        self._call_back_if_clear()

    def _call_back_if_clear(self) -> None:
        with self._lock:
            if self._waiting:
                return
            callbacks, self._when_clear = self._when_clear, []
        for callback in callbacks:
            callback()


@dataclass(slots=True, kw_only=True, eq=False)
class Inference:
    """One request on its way. It ends exactly once: with the response that is `final`.

    The requester makes it and calls `InferenceServer.submit`; schedulers queue it, an instance executes it.
    `send`, `fail` and `cancel` are safe from any thread.

    Attributes:
        request: what was asked, unchanged.
        on_response: where the responses go.
        inputs: what the model gets: the request's inputs, and the control tensors and states that a
            scheduler adds.
        batch_size: how many rows it has; 1 where the model does not batch.
        model_name: of the model that it is at; with the version, in every response.
        model_version: the one that was chosen.
        submitted_ns: `time.monotonic_ns()` at its submission.
        started_ns: when an instance took it up; 0: it waits.
        reschedule: set by a model of iterative sequences: execute this request again, it has not ended.
        states: the implicit states of its sequence by input name; None: the model has none.
        num_responses: sent so far, errors included.
        error: of the first response that failed.
        executors: those that may execute it, and once it is executed, the one that does; empty where no
            executor is needed.
        parts: what it waits for in its turn, as an ensemble does.
        blocked_by: tells what keeps it from being submitted: one of these is to end first.
        backlog: of its responses; whoever answers is to wait until it is clear. None: it always is.
        span: what is written down of it; None: it is not traced.
    """

    request: InferenceRequest
    on_response: OnResponse
    inputs: dict[str, Tensor] = field(init=False)
    batch_size: int = 1
    model_name: str = ""
    model_version: int = 0
    submitted_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0
    reschedule: bool = False
    states: dict[str, Tensor] | None = None
    num_responses: int = 0
    error: GenserveError | None = None
    executors: Sequence[Executor] = ()
    parts: list[Inference] = field(default_factory=list, repr=False)
    blocked_by: Callable[[], Sequence[Inference]] = field(default=tuple, repr=False)
    backlog: Backlog | None = field(default=None, repr=False)
    span: Span | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _ended: bool = field(default=False, init=False)
    _cancelled: bool = field(default=False, init=False)
    _on_cancel: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False)
    _on_end: list[Callable[[Inference], None]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.inputs = dict(self.request.inputs)

    @property
    def ended(self) -> bool:
        """Whether the final response was sent."""
        return self._ended

    @property
    def cancelled(self) -> bool:
        """Whether the requester has lost interest; whoever runs it may stop, and still has to end it."""
        return self._cancelled

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Answer with one response, or end without one.

        Raises:
            Closed: it has ended already.
        """
        with self._lock:
            if self._ended:
                raise Closed("Unable to send response. Response sender has been closed.")
            self._ended = final
            if final:
                self._on_cancel.clear()  # they refer to it: nothing is left for the garbage collector
            if response is not None:
                self.num_responses += 1
                self.error = self.error or response.error
        try:
            self.on_response(response, final)
        finally:  # whatever the requester does: who counts and waits must know
            if final:
                for callback in self._on_end:
                    callback(self)
                self._on_end.clear()

    def fail(self, error: GenserveError) -> None:
        """End with an error; does nothing if it has ended already."""
        try:
            self.send(InferenceResponse(error=error), final=True)
        except Closed:
            return

    def cancel(self) -> None:
        """Say that nobody waits for it any more; a second call does nothing."""
        with self._lock:
            if self._cancelled or self._ended:
                return
            self._cancelled = True
            callbacks = list(self._on_cancel)
        for callback in callbacks:
            callback()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """Call back once it is cancelled: at once if it is already, and never once it has ended."""
        with self._lock:
            if self._ended:
                return
            if not self._cancelled:
                self._on_cancel.append(callback)
                return
        callback()

    def when_ended(self, callback: Callable[[Inference], None]) -> None:
        """Call back with it after the final response; to be registered before it is submitted on."""
        self._on_end.append(callback)

    def fail_cancelled(self) -> None:
        """End it as cancelled, in Triton's words."""
        self.fail(InferenceError("Request was cancelled", status=Status.CANCELLED))


def with_request_id(message: str, request_id: str = "") -> str:
    """Return what is wrong with a request as Triton says it, with the request's id in front."""
    return f"[request id: {request_id or '<id_unknown>'}] {message}"


class InferenceServer(Protocol):
    """The way in to every model of the repository: for the routes, for ensembles and for BLS alike."""

    def submit(self, inference: Inference) -> None:
        """Find the model, check the request against its config, and queue it.

        Raises:
            InferenceError: no such model or version, not ready, a request that does not fit, a full queue.
                Nothing was sent then, and `inference` has not ended.
        """

    def load(self, name: str, *, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model; with `files`, by `<version>/<name>`, from these alone.

        Raises:
            InferenceError: it cannot be loaded, or the server does not allow it.
        """

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """Begin to unload a model. Raises InferenceError."""

    def is_ready(self, name: str, version: int = -1) -> bool:
        """Whether a model answers."""

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        """Whether a model gives any number of responses to a request.

        Raises:
            InferenceError: no such model or version, or not ready.
        """
