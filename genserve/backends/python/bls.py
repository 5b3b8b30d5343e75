"""BLS: inference requests from one model to others in the same process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from genserve.backends.python.deadlock import deadlocked, waits_for_itself
from genserve.errors import GenserveError, InferenceError, Status
from genserve.inference import Executor, Inference, InferenceRequest, InferenceResponse, InferenceServer
from genserve.wakeup import Wakeup

__all__ = ["LOOK_EVERY_S", "Answers", "Wait", "answers_async", "call", "call_async", "lift_if_circular"]


logger = logging.getLogger(__name__)

T = TypeVar("T")

# How often a wait is looked at; what is deadlocked twice in a row fails.
LOOK_EVERY_S = 0.25


def call(
    request: InferenceRequest, *, server: InferenceServer, executor: Executor | None
) -> InferenceResponse:
    """Ask a model that is not decoupled, and wait for its answer.

    Args:
        request: what is asked.
        server: runs the models.
        executor: the instance that waits; None: nobody waits for whoever does.

    Returns:
        The answer; failures of any kind are in its `error`.
    """
    answer = _Answer()
    inference = Inference(request=request, on_response=answer.receive)
    wait = Wait(inference, executor)
    try:
        _submit(inference, server, decoupled=False)
        while not answer.wait():
            wait.look()
    except GenserveError as error:
        _THREAD.wakeup = None  # it may still be notified for this call
        inference.cancel()
        return InferenceResponse(error=error)
    finally:
        wait.end()
    return _only(answer.responses)


class _Thread(threading.local):
    """What a thread keeps from call to call: it waits for one at a time."""

    wakeup: Wakeup | None = None


_THREAD = _Thread()


class _Answer:
    """The answer to one call, for the thread that made it."""

    __slots__ = ("_ended", "_wakeup", "responses")

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self._ended = False
        wakeup = _THREAD.wakeup
        if wakeup is None:
            wakeup = _THREAD.wakeup = Wakeup()
        self._wakeup = wakeup

    def receive(self, response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
        if response is not None:
            self.responses.append(response)
        if final:
            self._ended = True
            self._wakeup.notify()

    def wait(self) -> bool:
        """Wait for the end, for a while; whether it is there."""
        return self._wakeup.wait(None if self._ended else LOOK_EVERY_S)


def call_async(
    request: InferenceRequest,
    *,
    server: InferenceServer,
    executor: Executor | None,
    convert: Callable[[InferenceResponse], T],
) -> asyncio.Future[T]:
    """Ask a model that is not decoupled; the running loop is told of its answer, converted.

    A future that is cancelled cancels the inference.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    responses: list[InferenceResponse] = []

    def receive(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
        if response is not None:
            responses.append(response)
        if final:
            _tell(answer, lambda: convert(_only(responses)))

    inference = Inference(request=request, on_response=receive)

    def fail(error: GenserveError) -> None:
        answer.set_result(convert(InferenceResponse(error=error)))

    _watch(answer, inference=inference, executor=executor, fail=fail)
    try:
        _submit(inference, server, decoupled=False)
    except GenserveError as error:
        fail(error)
    return answer


def answers_async(
    request: InferenceRequest,
    *,
    server: InferenceServer,
    executor: Executor | None,
    convert: Callable[[Answers], T],
) -> asyncio.Future[T]:
    """Ask a model, decoupled or not; the running loop is told of its answers, converted, with the first."""
    arrived: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    answers = Answers(
        request,
        server=server,
        executor=executor,
        on_answer=lambda: _tell(arrived, lambda: convert(answers)),
    )
    _watch(arrived, inference=answers.inference, executor=executor, fail=answers.fail)
    return arrived


class Answers:
    """The answers of a model, decoupled or not, as they come; to be iterated by one thread.

    The last one is empty if the model says so late that it has no more.
    """

    def __init__(
        self,
        request: InferenceRequest,
        *,
        server: InferenceServer,
        executor: Executor | None,
        on_answer: Callable[[], None] | None = None,
    ) -> None:
        """Ask; a failure is the only answer.

        Args:
            request: what is asked.
            server: runs the models.
            executor: the instance that waits, while it does; None: nobody waits for whoever does.
            on_answer: called after each answer, on whichever thread it came.
        """
        self._on_answer = on_answer
        self._answers: SimpleQueue[tuple[InferenceResponse, bool]] = SimpleQueue()
        self.inference = Inference(request=request, on_response=self._receive)
        self._executor = executor
        try:
            _submit(self.inference, server, decoupled=True)
        except GenserveError as error:
            self.fail(error)

    def cancel(self) -> None:
        """Tell the model that no more answers are wanted."""
        self.inference.cancel()

    def fail(self, error: GenserveError) -> None:
        """End them with an error."""
        self._receive(InferenceResponse(error=error), True)  # noqa: FBT003

    def __iter__(self) -> Iterator[InferenceResponse]:
        final = False
        while not final:
            response, final = self._next()
            yield response

    def _next(self) -> tuple[InferenceResponse, bool]:
        wait = Wait(self.inference, self._executor)
        try:
            while True:
                try:
                    return self._answers.get(timeout=LOOK_EVERY_S)
                except Empty:
                    wait.look()
        except GenserveError as error:
            self.inference.cancel()
            return InferenceResponse(error=error), True
        finally:
            wait.end()

    def _receive(self, response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
        self._answers.put((response or InferenceResponse(), final))
        if self._on_answer is not None:
            self._on_answer()


class Wait:
    """An instance waits for an inference; while it does, others can see so.

    Attributes:
        inference: what is waited for.
    """

    def __init__(self, inference: Inference, executor: Executor | None) -> None:
        """Begin to wait.

        Args:
            inference: what is waited for.
            executor: the instance that waits; None: it is none that others need.
        """
        self.inference = inference
        self._executor = executor
        self._batch = executor.executing if executor is not None else ()
        self._suspected = False
        if executor is not None:
            executor.waiting_for.add(inference)

    def look(self) -> None:
        """Raise InferenceError if there is no hope for the inference.

        Two looks must agree: requests move on while one looks at them.
        """
        if self._executor is not None and self._executor.executing is not self._batch:
            self.end()  # a task that outlived its batch: the instance does not wait for it
        suspected, self._suspected = self._suspected, deadlocked(self.inference)
        if suspected and self._suspected:
            raise _no_instance(self.inference)

    def end(self) -> None:
        """Wait no more."""
        if self._executor is not None:
            self._executor.waiting_for.discard(self.inference)


def lift_if_circular(inference: Inference) -> None:
    """Let the model that answers go on, if the backlog of its responses waits for the model itself."""
    if inference.backlog is not None and waits_for_itself(inference):
        logger.warning(
            "model %s is not held up by max_inflight_requests: a later step of the request waits for it",
            inference.model_name,
        )
        inference.backlog.lift()


def _submit(inference: Inference, server: InferenceServer, *, decoupled: bool) -> None:
    """Raise InferenceError with the text that BLS has for it."""
    request = inference.request
    name = request.model_name
    try:
        if server.is_decoupled(name, request.model_version) and not decoupled:
            raise InferenceError(
                f"Model {name} is using the decoupled. The current BLS request call doesn't support models "
                "using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' "
                "or 'async_exec' calls for decoupled models.'",
                status=Status.INTERNAL,
            )
        server.submit(inference)
    except GenserveError as error:
        text = error.message
        if not server.is_ready(name, request.model_version):
            text = f"Failed for execute the inference request. Model '{name}' is not ready."
        raise _call_error(name, text, status=getattr(error, "status", Status.INTERNAL)) from error


def _no_instance(inference: Inference) -> InferenceError:
    name = inference.request.model_name
    return _call_error(
        name,
        "every instance that could run the request waits, directly or by way of other models, for this very "
        f"request. Raise the count in the instance_group of model '{name}', or the resources that there are "
        "for its rate_limiter, or break the circle of calls.",
        status=Status.UNAVAILABLE,
    )


def _call_error(name: str, text: str, *, status: Status) -> InferenceError:
    return InferenceError(f"Model {name} - Error when running inference: {text}", status=status)


def _only(responses: list[InferenceResponse]) -> InferenceResponse:
    if responses:
        return responses[0]
    return InferenceResponse(error=InferenceError("Unexpected empty response.", status=Status.INTERNAL))


def _watch(
    answer: asyncio.Future[Any],
    *,
    inference: Inference,
    executor: Executor | None,
    fail: Callable[[GenserveError], None],
) -> None:
    """Look at the wait for an answer until it is there."""
    loop = answer.get_loop()
    wait = Wait(inference, executor)
    next_look: asyncio.TimerHandle

    def look() -> None:
        nonlocal next_look
        if answer.done():
            return
        try:
            wait.look()
        except GenserveError as error:
            fail(error)
            inference.cancel()
        else:
            next_look = loop.call_later(LOOK_EVERY_S, look)

    def ended(answer: asyncio.Future[Any]) -> None:
        next_look.cancel()  # or it would keep the answer until then
        wait.end()
        if answer.cancelled():
            inference.cancel()

    answer.add_done_callback(ended)
    next_look = loop.call_later(LOOK_EVERY_S, look)


def _tell(answer: asyncio.Future[T], value: Callable[[], T]) -> None:
    """Answer from another thread than the loop's."""

    def set_result() -> None:
        if not answer.done():
            answer.set_result(value())

    try:
        answer.get_loop().call_soon_threadsafe(set_result)
    except RuntimeError:
        return  # the loop was closed: nobody waits
