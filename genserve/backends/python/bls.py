"""BLS (business logic scripting): inference requests from a model.py to other models of the same server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from genserve.backends.python.deadlock import CHECK_INTERVAL_S, Wait, bls_error
from genserve.backends.python.model_context import RunningBatch
from genserve.errors import GenserveError, InferenceError, Status
from genserve.inference import Executor, Inference, InferenceRequest, InferenceResponse, InferenceServer
from genserve.request_context import NO_KEY
from genserve.wakeup import Wakeup

T = TypeVar("T")


def bls_exec(
    request: InferenceRequest,
    *,
    server: InferenceServer,
    executor: Executor | None,
    batch: RunningBatch | None = None,
) -> InferenceResponse:
    """Send a request to a model that is not decoupled, and wait for the response.

    Args:
        request: to send.
        server: runs the models.
        executor: the instance that waits; None: no instance is blocked.
        batch: the batch that makes the request and cancels it with itself; None: it is unknown.

    Returns:
        The response; failures of any kind are in its `error`.
    """
    answer = _AwaitedResponses()
    inference = Inference(request=request, on_response=answer.receive, takes_stream=False, share=NO_KEY)
    wait = Wait(inference, executor)
    try:
        _submit(inference, server, batch)
        while not answer.wait():
            wait.check()
    except GenserveError as error:
        _THREAD.wakeup = None  # it may still be notified for this request
        inference.cancel()
        return InferenceResponse(error=error)
    finally:
        wait.end()
    return _single_response(answer.responses)


class _Thread(threading.local):
    """The wakeup of a thread, reused by its BLS requests, of which it waits for one at a time."""

    wakeup: Wakeup | None = None


_THREAD = _Thread()


class _AwaitedResponses:
    """The responses to one request, for the thread that waits for them."""

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
        """Wait for the final response, at most `CHECK_INTERVAL_S`; return whether it has arrived."""
        return self._wakeup.wait(None if self._ended else CHECK_INTERVAL_S)


def bls_exec_async(
    request: InferenceRequest,
    *,
    server: InferenceServer,
    executor: Executor | None,
    batch: RunningBatch | None = None,
    convert: Callable[[InferenceResponse], T],
) -> asyncio.Future[T]:
    """Send a request to a model that is not decoupled; return a future of the converted response.

    The future belongs to the running loop. Cancelling it cancels the inference.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    responses: list[InferenceResponse] = []

    def receive(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
        if response is not None:
            responses.append(response)
        if final:
            _set_result_threadsafe(answer, lambda: convert(_single_response(responses)))

    inference = Inference(request=request, on_response=receive, takes_stream=False, share=NO_KEY)

    def fail(error: GenserveError) -> None:
        answer.set_result(convert(InferenceResponse(error=error)))

    _check_until_done(answer, inference=inference, executor=executor, fail=fail)
    try:
        _submit(inference, server, batch)
    except GenserveError as error:
        fail(error)
    return answer


def bls_stream_async(
    request: InferenceRequest,
    *,
    server: InferenceServer,
    executor: Executor | None,
    batch: RunningBatch | None = None,
    convert: Callable[[BlsResponses], T],
) -> asyncio.Future[T]:
    """Send a request to any model; return a future of its converted responses, done with the first."""
    arrived: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    responses = BlsResponses(
        request,
        server=server,
        executor=executor,
        batch=batch,
        on_response=lambda: _set_result_threadsafe(arrived, lambda: convert(responses)),
    )
    _check_until_done(arrived, inference=responses.inference, executor=executor, fail=responses.fail)
    return arrived


class BlsResponses:
    """The responses of a model, decoupled or not, as they arrive; iterated by one thread.

    The last response is empty if the model ends the request after its last response.
    """

    def __init__(
        self,
        request: InferenceRequest,
        *,
        server: InferenceServer,
        executor: Executor | None,
        batch: RunningBatch | None = None,
        on_response: Callable[[], None] | None = None,
    ) -> None:
        """Send the request; if that fails, the error is the only response.

        Args:
            request: to send.
            server: runs the models.
            executor: the instance that waits while it iterates; None: no instance is blocked.
            batch: the batch that makes the request and cancels it with itself; None: it is unknown.
            on_response: called after each response, on any thread.
        """
        self._on_response = on_response
        self._responses: SimpleQueue[tuple[InferenceResponse, bool]] = SimpleQueue()
        self.inference = Inference(request=request, on_response=self._receive, share=NO_KEY)
        self._executor = executor
        try:
            _submit(self.inference, server, batch)
        except GenserveError as error:
            self.fail(error)

    def cancel(self) -> None:
        """Cancel the request."""
        self.inference.cancel()

    def fail(self, error: GenserveError) -> None:
        """End the responses with an error."""
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
                    return self._responses.get(timeout=CHECK_INTERVAL_S)
                except Empty:
                    wait.check()
        except GenserveError as error:
            self.inference.cancel()
            return InferenceResponse(error=error), True
        finally:
            wait.end()

    def _receive(self, response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
        self._responses.put((response or InferenceResponse(), final))
        if self._on_response is not None:
            self._on_response()


def _submit(inference: Inference, server: InferenceServer, batch: RunningBatch | None) -> None:
    """Submit an inference, which gets the key of the batch that makes it and is cancelled with it.

    Raises:
        InferenceError: it is rejected; with Triton's texts for BLS.
    """
    request = inference.request
    name = request.model_name
    if batch is not None:
        batch.add(inference)
    try:
        server.submit(inference)
    except GenserveError as error:
        if batch is not None:
            batch.remove(inference)
        text = error.message
        if not server.is_ready(name, request.model_version):
            text = f"Failed for execute the inference request. Model '{name}' is not ready."
        raise bls_error(name, text, status=getattr(error, "status", Status.INTERNAL)) from error


def _single_response(responses: list[InferenceResponse]) -> InferenceResponse:
    if responses:
        return responses[0]
    return InferenceResponse(error=InferenceError("Unexpected empty response.", status=Status.INTERNAL))


def _check_until_done(
    answer: asyncio.Future[Any],
    *,
    inference: Inference,
    executor: Executor | None,
    fail: Callable[[GenserveError], None],
) -> None:
    """Check the wait for a future periodically, and fail it when it is deadlocked."""
    loop = answer.get_loop()
    wait = Wait(inference, executor)
    next_check: asyncio.TimerHandle

    def check() -> None:
        nonlocal next_check
        if answer.done():
            return
        try:
            wait.check()
        except GenserveError as error:
            fail(error)
            inference.cancel()
        else:
            next_check = loop.call_later(CHECK_INTERVAL_S, check)

    def ended(answer: asyncio.Future[Any]) -> None:
        next_check.cancel()  # or it would keep the answer alive until then
        wait.end()
        if answer.cancelled():
            inference.cancel()

    answer.add_done_callback(ended)
    next_check = loop.call_later(CHECK_INTERVAL_S, check)


def _set_result_threadsafe(answer: asyncio.Future[T], result: Callable[[], T]) -> None:
    """Set the result of a future from a thread other than its loop's."""

    def set_result() -> None:
        if not answer.done():
            answer.set_result(result())

    try:
        answer.get_loop().call_soon_threadsafe(set_result)
    except RuntimeError:
        return  # the loop is closed: nothing waits
