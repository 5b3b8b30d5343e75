"""Stub: a Python model in a process of its own, as the server sees it.

Tensors are copied between the processes. BLS requests, model loads and custom metrics of the model travel
back to the server, so that the model reaches the same models as one that runs in the server's process.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import connection
from typing import Any

from genserve.backends.python.custom_metrics import CustomMetrics, StubMetrics
from genserve.backends.python.deadlock import CHECK_INTERVAL_S, Wait, lift_backlog_if_circular
from genserve.backends.python.model_context import ModelContext
from genserve.backends.python.python_model import ModelSetup
from genserve.backends.python.stub_channel import (
    Channel,
    WriterThread,
    portable_error,
    portable_inference,
    portable_response,
)
from genserve.backends.python.stub_process import run_model
from genserve.errors import Closed, GenserveError, InferenceError, Status
from genserve.inference import Inference, InferenceRequest, InferenceResponse, common_share

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 6.0  # longer than that of the model's own check
_EXIT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 15.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
_RESTART_TIMEOUT_S = 15.0  # that a batch waits for a process which is being restarted
_DIED_STARTING = "its process ended in `initialize`, or while model.py was imported: mend it"
_NOT_EXECUTED = "nothing was executed: send the request again"
# INTERNAL, as in Triton, on which KServe's clients do not repeat a request: one that crashes its process
# would crash the next one too.
_DIED_EXECUTING = "its process ended during the request, which may be the cause; the log has the reason"
_MAY_BLOCK = frozenset({"load", "unload", "is_ready"})  # methods of `InferenceServer`


class ModelProcess:
    """Runs a model in a stub process, with the methods of `PythonModel`.

    When the process dies, its requests fail, and it is restarted after a pause that doubles each time. The
    next requests wait for it, so a crash fails no others than its own.
    """

    def __init__(
        self, setup: ModelSetup, *, context: ModelContext, close_timeout_s: float = _CLOSE_TIMEOUT_S
    ) -> None:
        """Start the process, and wait until the model is initialized.

        Args:
            setup: the model.py, and the arguments of its `initialize`.
            context: the model's name, folder, outputs and server.
            close_timeout_s: time to finalize the model, after which the process is terminated, and after
                twice the time killed.

        Raises:
            InferenceError: raised by the model.
        """
        self._setup = setup
        self._context = context
        self._close_timeout_s = close_timeout_s
        self._closing = threading.Event()
        self._lock = threading.Lock()  # so that `close` sees each process that is started
        self._restarted = threading.Condition()
        self._start()
        self._reader = threading.Thread(target=self._serve, name=f"process-{context.instance}", daemon=True)
        self._reader.start()

    def execute(self, batch: Sequence[Inference]) -> None:
        """Execute a batch, after the restart if the process is being restarted.

        Raises:
            InferenceError: raised by the model, or its process has died, or was not restarted in time.
        """
        with self._restarted:
            self._restarted.wait_for(lambda: self._stub.alive or self._closing.is_set(), _RESTART_TIMEOUT_S)
        self._stub.execute(batch)

    def is_ready(self) -> bool:
        """Whether the process is alive, and the model's `is_ready`, if it has one, returns True."""
        return self._stub.is_ready()

    def close(self) -> None:
        """Finalize the model, and end the process."""
        self._close()
        self._stub.close(timeout_s=self._close_timeout_s)
        self._reader.join()

    def abort(self) -> bool:
        """Kill the process: the current batch fails, and the process is not restarted."""
        self._close()
        logger.error("the process of %s does not finish its batch and is killed", self._context.instance)
        self._stub.kill()
        return True

    def _close(self) -> None:
        with self._lock:
            self._closing.set()
        with self._restarted:
            self._restarted.notify_all()

    def _start(self) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._stub = Stub(self._setup, context=self._context)
        self._stub.start()
        with self._restarted:
            self._restarted.notify_all()

    def _serve(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            self._stub.serve()
            if self._closing.is_set():
                return
            if self._stub.has_executed:
                pause_s = _FIRST_PAUSE_S
            instance = self._context.instance
            logger.error("the process of %s died and will be restarted in %s s", instance, pause_s)
            while not self._stub.alive:
                if self._closing.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                try:
                    self._start()
                except Exception:
                    logger.exception("the process of %s could not be restarted", instance)


class Stub:
    """One process that runs a PythonModel, from start to end.

    `start` and then `serve` are called by one thread, which reads the messages of the process.

    Attributes:
        alive: whether the model is initialized and the process has not been seen to be dead.
        has_executed: whether it has executed a batch.
    """

    def __init__(self, setup: ModelSetup, *, context: ModelContext) -> None:
        """Start the process; its model is initialized by `start`."""
        self.alive = False
        self.has_executed = False
        self._instance = context.instance
        self._numbers = itertools.count()
        self._pending: dict[int, Inference] = {}
        self._number_of: dict[Inference, int] = {}
        self._replies: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        # If two threads poll a process that has just died, one of them sees it alive.
        self._process_lock = threading.Lock()
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        portable_context = replace(context, server=None, metrics=None, executor=None)
        self._process = spawn.Process(
            target=run_model, args=(there, setup, portable_context), name=context.instance, daemon=True
        )
        self._process.start()
        there.close()
        self._channel = Channel(here)
        self._writer = WriterThread(self._channel, name=f"write-{context.instance}")
        self._requests = _StubRequests(self._writer, context=context)

    def start(self) -> None:
        """Wait until the model is initialized.

        Raises:
            InferenceError: raised by the model, or the process died.
        """
        error: InferenceError | None = self._dead_error(remedy=_DIED_STARTING)
        for message in self._messages():
            if message[0] == "started":
                _, error, self._has_ready_check = message
                break
            self._handle(message)  # `initialize` logs, loads and measures as well
        if error is not None:
            self._end()
            raise error
        self.alive = True

    def serve(self) -> None:
        """Handle the messages of the process until it is dead; then fail its requests."""
        for message in self._messages():
            self._handle(message)
        self._end()

    def execute(self, batch: Sequence[Inference]) -> None:
        """Execute a batch.

        Raises:
            InferenceError: raised by the model, or the process is dead.
        """
        requests = [
            (self._number(inference), portable_inference(inference), inference.backlog is not None)
            for inference in batch
        ]
        rescheduled = self._ask("execute", requests)
        for inference, (number, *_) in zip(batch, requests, strict=True):
            inference.reschedule = number in rescheduled

    def is_ready(self) -> bool:
        """Whether the process is alive, and the model's `is_ready`, if it has one, returns True."""
        if not (self.alive and self._has_ready_check):
            return self.alive
        try:
            return bool(self._ask("is_ready", timeout_s=_READY_TIMEOUT_S))
        except (TimeoutError, InferenceError):
            return False

    def close(self, *, timeout_s: float) -> None:
        """Finalize the model and end the process, by force after the timeout. From any thread."""
        self._writer.send(("close",))
        self._join(timeout_s)

    def kill(self) -> None:
        """Kill the process. From any thread."""
        with self._process_lock:
            self._process.kill()

    def _is_running(self) -> bool:
        with self._process_lock:
            return self._process.is_alive()

    def _messages(self) -> Iterator[tuple[Any, ...]]:
        """Yield the messages of the process until it is dead; check its requests periodically in between."""
        next_check_s = time.monotonic() + CHECK_INTERVAL_S
        while True:
            try:
                message = self._channel.receive(max(0.0, next_check_s - time.monotonic()))
            except (EOFError, OSError):
                return
            except Exception:
                logger.exception("a message of the process of %s cannot be read", self._instance)
                continue
            if message is not None:
                yield message
            elif not self._is_running():
                return  # a process that it has forked keeps the pipe open
            if time.monotonic() >= next_check_s:
                self._check_waits()
                next_check_s = time.monotonic() + CHECK_INTERVAL_S

    def _handle(self, message: tuple[Any, ...]) -> None:
        try:
            match message:
                case ("response", number, response, final):
                    self._on_response(number, response, final=final)
                case ("executed", number, error, rescheduled):
                    self.has_executed = True
                    self._resolve(number, rescheduled, error=error)
                case ("ready", number, ready):
                    self._resolve(number, ready)
                case ("log", name, level, text, traceback):
                    _log(name, level, text, traceback=traceback)
                case ("call", number, request, takes_stream):
                    self._requests.call(number, request, takes_stream=takes_stream)
                case ("cancel_call", number):
                    self._requests.cancel_call(number)
                case ("ask", number, method, args, fields):
                    self._requests.ask(number, method, args, fields)
                case ("measure", number, *arguments):
                    self._requests.measure(number, *arguments)
        except Exception:  # the next messages must be read
            logger.exception("a message (%s) of the process of %s failed", message[0], self._instance)

    def _on_response(self, number: int, response: InferenceResponse | None, *, final: bool) -> None:
        inference = self._pending.get(number)
        if inference is None:
            self._clear(number)
            return
        try:
            inference.send(response, final=final)
        except Closed:
            pass
        except Exception as error:
            inference.fail(InferenceError.of(error))
            raise
        finally:
            if inference.backlog is not None and not final:
                inference.backlog.when_clear(partial(self._clear, number))

    def _clear(self, number: int) -> None:
        """Allow the process to send one more response to a request with a backlog."""
        self._writer.send(("clear", number))

    def _check_waits(self) -> None:
        try:
            for inference in list(self._pending.values()):
                lift_backlog_if_circular(inference)
            self._requests.check()
        except Exception:  # the messages of the process must be read
            logger.exception("the requests of the process of %s could not be checked", self._instance)

    def _ask(self, kind: str, *arguments: object, timeout_s: float | None = None) -> Any:
        """Send a message to the process, and wait for its reply."""
        reply: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if not self.alive:
                raise self._dead_error(Status.UNAVAILABLE, remedy=_NOT_EXECUTED)
            self._replies[number] = reply
        self._writer.send((kind, number, *arguments))
        try:
            return reply.result(timeout_s)
        finally:
            self._replies.pop(number, None)

    def _resolve(self, number: int, result: object, *, error: GenserveError | None = None) -> None:
        reply = self._replies.pop(number, None)
        if reply is None:
            return
        if error is not None:
            reply.set_exception(error)
        else:
            reply.set_result(result)

    def _number(self, inference: Inference) -> int:
        number = self._number_of.get(inference)
        if number is None:  # not rescheduled
            number = self._number_of[inference] = next(self._numbers)
            self._pending[number] = inference
            inference.when_ended(self._forget)
            inference.when_cancelled(partial(self._writer.send, ("cancel", number)))
            if inference.ended:  # before the callback was set
                self._forget(inference)
        return number

    def _forget(self, inference: Inference) -> None:
        number = self._number_of.pop(inference, None)
        if number is not None:
            self._pending.pop(number, None)

    def _end(self) -> None:
        with self._lock:
            self.alive = False
        for number in list(self._replies):
            self._resolve(number, None, error=self._dead_error())
        for inference in list(self._pending.values()):
            inference.fail(self._dead_error())
        self._requests.end()
        self._join(_EXIT_TIMEOUT_S)
        self._writer.end()

    def _join(self, timeout_s: float) -> None:
        if not self._has_ended(timeout_s):
            logger.error("the process of %s did not end in %s s and is killed", self._instance, timeout_s)
            with self._process_lock:
                self._process.terminate()
            if not self._has_ended(timeout_s):
                self.kill()
        self._kill_group()
        with self._process_lock:
            self._process.join()

    def _kill_group(self) -> None:
        """Kill the processes that the model has started and left behind."""
        if hasattr(os, "killpg") and self._process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):     # there are none
                os.killpg(self._process.pid, signal.SIGKILL)

    def _has_ended(self, timeout_s: float) -> bool:
        """Whether the process ends in time; a process that it has forked may keep its sentinel open."""
        return bool(connection.wait([self._process.sentinel], timeout_s)) or not self._is_running()

    def _dead_error(
        self, status: Status = Status.INTERNAL, *, remedy: str = _DIED_EXECUTING
    ) -> InferenceError:
        return InferenceError(
            f"Stub process '{self._instance}' is not healthy.",
            status=status,
            remedy=remedy,
        )


class _StubRequests:
    """Handles the requests of a stub process to the server: BLS, model control and custom metrics."""

    def __init__(self, writer: WriterThread, *, context: ModelContext) -> None:
        self._writer = writer
        self._context = context
        self._calls: dict[int, Wait] = {}
        self._metrics = StubMetrics(context.metrics or CustomMetrics())

    def call(self, number: int, request: InferenceRequest, *, takes_stream: bool) -> None:
        """Send a BLS request to another model."""

        def receive(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
            if final:
                self._end_call(number)
            self._writer.send(("answer", number, response and portable_response(response), final))

        inference = Inference(request=request, on_response=receive, takes_stream=takes_stream)
        executor = self._context.executor
        inference.share = common_share(executor.executing if executor else ())
        self._calls[number] = Wait(inference, None if self._context.decoupled else executor)
        if not self._reply(number, partial(self._method("submit"), inference)):
            self._end_call(number)

    def cancel_call(self, number: int) -> None:
        """Cancel a BLS request."""
        if wait := self._calls.get(number):
            wait.inference.cancel()

    def ask(self, number: int, method: str, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        """Call a method of the server."""
        act = partial(self._method(method), *args, **fields)
        if method in _MAY_BLOCK:
            threading.Thread(target=self._reply, args=[number, act], daemon=True).start()
        else:
            self._reply(number, act)

    def measure(self, number: int, *arguments: Any) -> None:
        """Call a method of a custom metric."""
        self._reply(number, partial(self._metrics.measure, *arguments))

    def check(self) -> None:
        """Fail the BLS requests that are deadlocked."""
        for number, wait in list(self._calls.items()):
            try:
                wait.check()
            except InferenceError as error:
                if self._end_call(number):
                    self._writer.send(("answer", number, InferenceResponse(error=error), True))
                    wait.inference.cancel()

    def end(self) -> None:
        """Cancel all BLS requests and release the metrics: the process is dead."""
        self._metrics.release()
        for number in list(self._calls):
            if wait := self._end_call(number):
                wait.inference.cancel()

    def _method(self, name: str) -> Callable[..., object]:
        method: Callable[..., object] = getattr(self._context.server, name)
        return method

    def _reply(self, number: int, act: Callable[[], object]) -> bool:
        """Send the result or the error of a call to the process; return whether it succeeded."""
        reply: object
        try:
            reply = act()
        except GenserveError as error:
            reply = portable_error(error)
        except ValueError as error:
            reply = ValueError(*error.args)  # without its traceback
        except Exception as error:
            logger.exception("a request of the process of %s failed", self._context.instance)
            reply = InferenceError.of(error)
        self._writer.send(("reply", number, reply))
        return not isinstance(reply, Exception)

    def _end_call(self, number: int) -> Wait | None:
        wait = self._calls.pop(number, None)
        if wait is not None:
            wait.end()
        return wait


def _log(name: str, level: int, text: str, *, traceback: str) -> None:
    logger = logging.getLogger(name)
    if logger.isEnabledFor(level):
        record = logger.makeRecord(name, level, "", 0, "%s", (text,), None)
        record.exc_text = traceback
        logger.handle(record)
