"""Inference: a request with named tensors on its way through a model, until its last response."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Protocol, TypeAlias

from genserve.errors import Closed, GenserveError, InferenceError, Status
from genserve.request_context import NO_KEY, KeyShare, current_request
from genserve.tensor import Tensor
from genserve.tracing import Span

Parameter: TypeAlias = bool | int | float | str


class RequestFlags(IntFlag):
    """The position of a request in its sequence; the bits are Triton's."""

    NONE = 0
    SEQUENCE_START = 1
    SEQUENCE_END = 2


# Immutable by convention: frozen dataclasses would cost 1 us per call.
@dataclass(slots=True, kw_only=True)
class InferenceRequest:
    """A request to one model, the same for every protocol and BLS; never changed."""

    model_name: str
    model_version: int = -1                             # -1: the highest that is ready
    id: str = ""
    inputs: Mapping[str, Tensor]
    requested_outputs: tuple[str, ...] = ()             # empty: all of them
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    correlation_id: int | str = 0                       # its sequence; 0 or "": none
    flags: RequestFlags = RequestFlags.NONE
    priority: int = 0                                   # 1 is the highest; 0: the model's default
    timeout_us: int = 0                                 # in the queue; 0: the model's default
    cause: Span | None = None                           # the span of the caller; None: it is not traced


@dataclass(slots=True, kw_only=True)
class InferenceResponse:
    """A response to a request, never changed; a decoupled model sends any number of them."""

    outputs: tuple[Tensor, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    error: GenserveError | None = None                  # with an error, the outputs are meaningless

    def output(self, name: str) -> Tensor | None:
        """Return the output of this name, or None."""
        return next((tensor for tensor in self.outputs if tensor.name == name), None)


# Called with each response; the last call has `final`, with the last response or with None. It runs on the
# thread from which the model answers, and must neither block nor raise.
OnResponse: TypeAlias = Callable[[InferenceResponse | None, bool], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Executor:
    """An instance of a model, as seen by the requests that need it.

    Attributes:
        name: the instance's name in logs.
        executing: the current batch; empty: the instance is idle.
        waiting_for: the inferences of the BLS calls that it waits for.
        blocked_by: returns the executors that hold a resource which it needs, or wait for one ahead of it.
    """

    name: str
    executing: Sequence[Inference] = ()
    waiting_for: set[Inference] = field(default_factory=set, repr=False)
    blocked_by: Callable[[], Sequence[Executor]] = field(default=tuple, repr=False)


# The instance whose `execute` runs the current code.
CURRENT_EXECUTOR: ContextVar[Executor | None] = ContextVar("current_executor", default=None)


class Backlog:
    """Requests that an ensemble made from the responses to an inference and has not submitted yet.

    The responding model waits until the backlog is empty: so an ensemble applies back-pressure to a step
    that is too fast. Safe from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Inference] = []
        self._when_clear: list[Callable[[], None]] = []
        self._lifted = False

    @property
    def waiting(self) -> Sequence[Inference]:
        """The waiting inferences, in order."""
        return tuple(self._waiting)

    def add(self, inference: Inference) -> None:
        """Add an inference."""
        with self._lock:
            if not self._lifted:
                self._waiting.append(inference)

    def remove(self, inference: Inference) -> None:
        """Remove an inference once; one that was added twice remains."""
        with self._lock:
            if inference in self._waiting:
                self._waiting.remove(inference)
        self._call_back_if_clear()

    def lift(self) -> None:
        """Empty the backlog for good, to break a deadlock."""
        with self._lock:
            self._lifted = True
            self._waiting.clear()
        self._call_back_if_clear()

    def when_clear(self, callback: Callable[[], None]) -> None:
        """Call back as soon as the backlog is empty, or now if it is."""
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

    A requester makes it and calls `InferenceServer.submit`; a model version accepts it, a scheduler queues
    it, an instance executes it. `send`, `fail` and `cancel` are safe from any thread.

    Attributes:
        request: the request as it came; no step changes it.
        on_response: called with each response after the steps of `accept`.
        takes_stream: whether the requester accepts any number of responses; else decoupled models reject it.
        all_read: waits until the requester has read all responses so far; None: it reads them at once.
        backlog: the requests made of the responses; the responding model waits until it is empty. None: it is
            always empty.
        submitted_ns: `time.monotonic_ns()` when it was made.
        model_version: the version that accepted it.
        batch_size: its rows; 1 if the model does not batch.
        inputs: the inputs of the request, reshaped, and the control tensors and states that a scheduler adds.
        states: the implicit states of its sequence by input name; None: the model is stateless.
        reschedule: set by a model of iterative sequences: execute this request again.
        span: its span in a trace; None: it is not traced.
        share: the share of the API key for which it is computed.
        started_ns: when an instance started it; 0: it waits.
        num_responses: responses sent so far, errors included.
        error: the error of the first failed response.
        ended: whether the final response was sent; only `send` sets it.
        cancelled: whether the requester has cancelled it; the model may stop, and still has to end it. Only
            `cancel` sets it.
        parts: the inferences that it waits for, as an ensemble for its steps.
        blocked_by: returns the executors of which it needs one, the executor that executes it, or the
            inferences of which one must end before it is submitted; empty: it waits for none.
    """

    request: InferenceRequest
    on_response: OnResponse
    takes_stream: bool = True
    all_read: Callable[[], Awaitable[None]] | None = field(default=None, repr=False)
    backlog: Backlog | None = field(default=None, repr=False)
    submitted_ns: int = field(default_factory=time.monotonic_ns)
    model_version: int = 0
    batch_size: int = 1
    inputs: dict[str, Tensor] = field(init=False)
    states: dict[str, Tensor] | None = None
    reschedule: bool = False
    span: Span | None = None
    share: KeyShare = field(default_factory=lambda: current_request().key)
    started_ns: int = 0
    num_responses: int = 0
    error: GenserveError | None = None
    ended: bool = field(default=False, init=False)
    cancelled: bool = field(default=False, init=False)
    parts: list[Inference] = field(default_factory=list, repr=False)
    blocked_by: Callable[[], Sequence[Executor | Inference]] = field(default=tuple, repr=False)
    _steps: Sequence[ResponseStep] = field(default=(), init=False, repr=False)
    _order: ResponseOrder | None = field(default=None, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _on_cancel: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False)
    _on_end: list[Callable[[Inference], None]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.inputs = dict(self.request.inputs)

    def accept(
        self,
        *,
        model_version: int,
        batch_size: int,
        response_steps: Sequence[ResponseStep] = (),
        span: Span | None = None,
    ) -> None:
        """Set what the model version that runs it knows of it; called once, before it is executed.

        Args:
            model_version: the version that runs it.
            batch_size: its rows; 1 if the model does not batch.
            response_steps: what each response passes on its way to `on_response`, in this order.
            span: its span in a trace, which is open; None: it is not traced.
        """
        self.model_version, self.batch_size = model_version, batch_size
        self._steps, self.span = response_steps, span

    def hold_back(self, order: ResponseOrder) -> None:
        """Let `order` decide from now on when each response is passed to the steps."""
        self._order = order

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Send a response, or end without one.

        Raises:
            Closed: it has ended.
        """
        with self._lock:
            if self.ended:
                raise Closed("Unable to send response. Response sender has been closed.")
            self.ended = final
            if final:
                self._on_cancel.clear()  # they refer to it: break the cycle
            if response is not None:
                self.num_responses += 1
                self.error = self.error or response.error
        try:
            if self._order is None:
                self.pass_on(response, final=final)
            else:
                self._order.put(self, response, final=final)
        finally:  # even if the requester raises
            if final:
                for callback in self._on_end:
                    callback(self)
                self._on_end.clear()

    def pass_on(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Take a sent response through the steps to the requester; for `send` and a `ResponseOrder`."""
        for step in self._steps:
            response = step(self, response, final)
        self.on_response(response, final)

    def fail(self, error: GenserveError) -> None:
        """End with an error; does nothing if it has ended already."""
        try:
            self.send(InferenceResponse(error=error), final=True)
        except Closed:
            return

    def cancel(self) -> None:
        """Cancel it for the requester. A second call does nothing."""
        with self._lock:
            if self.cancelled or self.ended:
                return
            self.cancelled = True
            callbacks = list(self._on_cancel)
        for callback in callbacks:
            callback()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """Call back when it is cancelled, or now if it is; never after its end."""
        with self._lock:
            if self.ended:
                return
            if not self.cancelled:
                self._on_cancel.append(callback)
                return
        callback()

    def when_ended(self, callback: Callable[[Inference], None]) -> None:
        """Call back with it after the final response; call this before `submit`."""
        self._on_end.append(callback)

    def fail_cancelled(self) -> None:
        """End it as cancelled, in Triton's words."""
        self.fail(InferenceError("Request was cancelled", status=Status.CANCELLED))


# A step that a response, or None at an end without one, passes on its way to the requester: returns what the
# next step takes. It runs on the thread from which the model answers, and must neither block nor raise.
ResponseStep: TypeAlias = Callable[[Inference, InferenceResponse | None, bool], InferenceResponse | None]


def common_share(inferences: Sequence[Inference]) -> KeyShare:
    """Return the share of the API key that all inferences have; none if their keys differ."""
    shares = {inference.share for inference in inferences}
    return shares.pop() if len(shares) == 1 else NO_KEY


class ResponseOrder(Protocol):
    """Orders the responses to several inferences."""

    def put(self, inference: Inference, response: InferenceResponse | None, *, final: bool) -> None:
        """Call `pass_on` with a response, now or after the responses to other inferences."""


def with_request_id(message: str, request_id: str = "") -> str:
    """Return an error message with the id of the request in front, as in Triton."""
    return f"[request id: {request_id or '<id_unknown>'}] {message}"


class InferenceServer(Protocol):
    """Runs all models of a repository: for the routes, for ensembles and for BLS."""

    def submit(self, inference: Inference) -> None:
        """Find the model, validate the request by its config, and queue it.

        Raises:
            InferenceError: an unknown model or version, not ready, an invalid request, a full queue. No
                response was sent, and `inference` is still open.
        """

    def load(self, name: str, *, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model; with `files`, by `<version>/<name>`, from these only.

        Raises:
            InferenceError: it cannot be loaded, or the server does not allow it.
        """

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """Begin to unload a model. Raises InferenceError."""

    def is_ready(self, name: str, version: int = -1) -> bool:
        """Whether a model is ready."""
