"""Stub: a Python model in a process of its own, as the server sees it.

Tensors are copied between the processes. BLS requests, model loads and custom metrics of the model travel
back to the server, so that the model reaches the same models as one that runs in the server's process.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing import connection
from typing import Any

from genserve.backends.python.bls import LOOK_EVERY_S, Wait, lift_if_circular
from genserve.backends.python.custom_metrics import Measures, MetricFamilies
from genserve.backends.python.model_context import Host
from genserve.backends.python.stub_channel import (
    Channel,
    WritingThread,
    portable_error,
    portable_inference,
    portable_response,
)
from genserve.backends.python.stub_process import ModelSetup, run_model
from genserve.errors import Closed, GenserveError, InferenceError, Status
from genserve.inference import Inference, InferenceRequest, InferenceResponse

__all__ = ["ModelProcess", "Stub"]


logger = logging.getLogger(__name__)

_READY_WITHIN_S = 6.0  # more than the model itself is given
_GONE_WITHIN_S = 5.0
_MAY_BLOCK = frozenset({"load", "unload", "is_ready"})  # of the methods of `InferenceServer`


class Stub:
    """A process that runs one PythonModel. It knows nothing of the one before it, nor of the next.

    `start` and then `serve` belong to one thread, which reads what the process says.

    Attributes:
        alive: whether its model is initialized, and the process not yet seen to be gone.
        has_executed: whether it has executed a batch.
    """

    def __init__(self, setup: ModelSetup, *, host: Host) -> None:
        """Start the process; its model is not initialized yet."""
        self.alive = False
        self.has_executed = False
        self._host = host
        self._numbers = itertools.count()
        self._pending: dict[int, Inference] = {}
        self._number_of: dict[Inference, int] = {}
        self._told: dict[int, Future[Any]] = {}
        self._calls: dict[int, Wait] = {}
        self._measures = Measures(host.families or MetricFamilies())
        self._lock = threading.Lock()
        # Of two threads that ask for a process at its end, one would be told that it lives.
        self._asking = threading.Lock()
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        host = replace(host, server=None, families=None, executor=None)
        arguments = (there, setup, host)
        self._process = context.Process(target=run_model, args=arguments, name=host.instance, daemon=True)
        self._process.start()
        there.close()
        self._channel = Channel(here)
        self._out = WritingThread(self._channel, name=f"write-{host.instance}")

    def start(self) -> None:
        """Wait until the model is initialized.

        Raises:
            InferenceError: what the model raised; or the process ended.
        """
        error: InferenceError | None = self._dead()
        for message in self._messages():
            if message[0] == "started":
                _, error, self._says_ready = message
                break
            self._handle(message)  # initialize, too, logs, loads and measures
        if error is not None:
            self._end()
            raise error
        self.alive = True

    def serve(self) -> None:
        """Handle what the process says until it is gone; what waits for it then fails."""
        for message in self._messages():
            self._handle(message)
        self._end()

    def execute(self, batch: Sequence[Inference]) -> None:
        """Have the model answer a batch.

        Raises:
            InferenceError: what the model raised; or the process is gone.
        """
        asked = [
            (self._number(inference), portable_inference(inference), inference.backlog is not None)
            for inference in batch
        ]
        rescheduled = self._ask("execute", asked)
        for inference, (number, *_) in zip(batch, asked, strict=True):
            inference.reschedule = number in rescheduled

    def is_ready(self) -> bool:
        """Whether the process lives, and the model says that it is ready; one that has nothing to say is."""
        if not (self.alive and self._says_ready):
            return self.alive
        try:
            return bool(self._ask("is_ready", timeout_s=_READY_WITHIN_S))
        except (TimeoutError, InferenceError):
            return False

    def close(self, *, within_s: float) -> None:
        """Finalize the model and end the process: by force if it does not in time. From any thread."""
        self._out.send(("close",))
        self._join(within_s)

    def kill(self) -> None:
        """End the process at once, whatever it does. From any thread."""
        with self._asking:
            self._process.kill()

    def _is_running(self) -> bool:
        with self._asking:
            return self._process.is_alive()

    def _messages(self) -> Iterator[tuple[Any, ...]]:
        """Yield what the process says until it is gone, and look after its calls, however much it says."""
        next_look_s = time.monotonic() + LOOK_EVERY_S
        while True:
            try:
                message = self._channel.receive(max(0.0, next_look_s - time.monotonic()))
            except (EOFError, OSError):
                return
            except Exception:
                logger.exception("a message of the process of %s cannot be read", self._host.instance)
                continue
            if message is not None:
                yield message
            elif not self._is_running():
                return  # and what it has forked holds the pipe
            if time.monotonic() >= next_look_s:
                self._look()
                next_look_s = time.monotonic() + LOOK_EVERY_S

    def _handle(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        try:
            getattr(self, f"_on_{kind}")(*rest)
        except Exception:  # it concerns one message: the others are waited for
            logger.exception("a message (%s) of the process of %s failed", kind, self._host.instance)

    def _on_response(self, number: int, response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
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
        """Tell the process that there is room for one more response; it waits for that where it must."""
        self._out.send(("clear", number))

    def _on_executed(self, number: int, error: InferenceError | None, rescheduled: list[int]) -> None:
        self.has_executed = True
        self._tell(number, rescheduled, error=error)

    def _on_ready(self, number: int, ready: bool) -> None:  # noqa: FBT001
        self._tell(number, ready)

    def _on_log(self, name: str, level: int, text: str, traceback: str) -> None:
        logger = logging.getLogger(name)
        if logger.isEnabledFor(level):
            record = logger.makeRecord(name, level, "", 0, "%s", (text,), None)
            record.exc_text = traceback
            logger.handle(record)

    def _on_call(self, number: int, request: InferenceRequest) -> None:
        """Ask another model for the process."""

        def receive(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
            if final:
                self._end_call(number)
            self._out.send(("answer", number, response and portable_response(response), final))

        inference = Inference(request=request, on_response=receive)
        self._calls[number] = Wait(inference, None if self._host.decoupled else self._host.executor)
        if not self._answer(number, partial(self._server("submit"), inference)):
            self._end_call(number)

    def _on_cancel_call(self, number: int) -> None:
        if wait := self._calls.get(number):
            wait.inference.cancel()

    def _on_ask(self, number: int, method: str, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        act = partial(self._server(method), *args, **fields)
        if method in _MAY_BLOCK:
            threading.Thread(target=self._answer, args=[number, act], daemon=True).start()
        else:
            self._answer(number, act)

    def _on_measure(self, number: int, *what: Any) -> None:
        """Do something with a metric for the process."""
        self._answer(number, partial(self._measures.measure, *what))

    def _server(self, method: str) -> Callable[..., object]:
        act: Callable[..., object] = getattr(self._host.server, method)
        return act

    def _answer(self, number: int, act: Callable[[], object]) -> bool:
        """Tell the process what came of something; return whether it succeeded."""
        reply: object
        try:
            reply = act()
        except GenserveError as error:
            reply = portable_error(error)
        except ValueError as error:
            reply = ValueError(*error.args)  # without the frames that it refers to
        except Exception as error:
            logger.exception("a call of the process of %s failed", self._host.instance)
            reply = InferenceError.of(error)
        self._out.send(("reply", number, reply))
        return not isinstance(reply, Exception)

    def _look(self) -> None:
        try:
            for inference in list(self._pending.values()):
                lift_if_circular(inference)
            for number, wait in list(self._calls.items()):
                self._look_at(number, wait)
        except Exception:  # the next look may succeed; until then the process is read on
            logger.exception("the calls of the process of %s could not be looked at", self._host.instance)

    def _look_at(self, number: int, wait: Wait) -> None:
        try:
            wait.look()
        except InferenceError as error:
            if self._end_call(number):
                self._out.send(("answer", number, InferenceResponse(error=error), True))
                wait.inference.cancel()

    def _end_call(self, number: int) -> Wait | None:
        wait = self._calls.pop(number, None)
        if wait is not None:
            wait.end()
        return wait

    def _ask(self, kind: str, *what: object, timeout_s: float | None = None) -> Any:
        """Ask something of the process, and wait for its answer."""
        told: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if not self.alive:
                raise self._dead()
            self._told[number] = told
        self._out.send((kind, number, *what))
        try:
            return told.result(timeout_s)
        finally:
            self._told.pop(number, None)

    def _tell(self, number: int, answer: object, *, error: GenserveError | None = None) -> None:
        told = self._told.pop(number, None)
        if told is None:
            return
        if error is not None:
            told.set_exception(error)
        else:
            told.set_result(answer)

    def _number(self, inference: Inference) -> int:
        number = self._number_of.get(inference)
        if number is None:  # or it was rescheduled
            number = self._number_of[inference] = next(self._numbers)
            self._pending[number] = inference
            inference.when_ended(self._forget)
            inference.when_cancelled(partial(self._out.send, ("cancel", number)))
            if inference.ended:  # before it was to be told so
                self._forget(inference)
        return number

    def _forget(self, inference: Inference) -> None:
        number = self._number_of.pop(inference, None)
        if number is not None:
            self._pending.pop(number, None)

    def _end(self) -> None:
        with self._lock:
            self.alive = False
        self._measures.forget()
        for number in list(self._told):
            self._tell(number, None, error=self._dead())
        for inference in list(self._pending.values()):
            inference.fail(self._dead())
        for number in list(self._calls):
            if wait := self._end_call(number):
                wait.inference.cancel()
        self._join(_GONE_WITHIN_S)
        self._out.end()

    def _join(self, within_s: float) -> None:
        if not self._has_ended(within_s):
            logger.error("the process of %s has not ended in %s s: killed", self._host.instance, within_s)
            with self._asking:
                self._process.terminate()
            if not self._has_ended(within_s):
                self.kill()
        with self._asking:
            self._process.join()

    def _has_ended(self, within_s: float) -> bool:
        """Whether the process ends in time; what it has forked may hold its sentinel for longer."""
        return bool(connection.wait([self._process.sentinel], within_s)) or not self._is_running()

    def _dead(self) -> InferenceError:
        return InferenceError(
            f"Stub process '{self._host.instance}' is not healthy.",
            status=Status.INTERNAL,
            remedy="the process of the model died and is being started again; the log says when and why",
        )




_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
_ENDS_WITHIN_S = 15.0


class ModelProcess:
    """Runs a PythonModel elsewhere; its methods are those of PythonModel.

    When the process dies, its requests fail, and it is started anew, after a pause that doubles each time.
    """

    def __init__(self, setup: ModelSetup, *, host: Host, ends_within_s: float = _ENDS_WITHIN_S) -> None:
        """Start the process, and wait until the model is initialized.

        Args:
            setup: of the model.
            host: what its code may reach.
            ends_within_s: a process that takes longer to finalize its model is terminated, and killed if
                that takes as long again.

        Raises:
            InferenceError: what the model raised.
        """
        self._setup = setup
        self._host = host
        self._ends_within_s = ends_within_s
        self._closing = threading.Event()
        self._lock = threading.Lock()  # `close` reaches each process that is started
        self._start()
        self._reader = threading.Thread(target=self._serve, name=f"process-{host.instance}", daemon=True)
        self._reader.start()

    def execute(self, batch: Sequence[Inference]) -> None:
        """Have the model answer a batch.

        Raises:
            InferenceError: what the model raised; or its process is dead.
        """
        self._stub.execute(batch)

    def is_ready(self) -> bool:
        """Whether the process lives, and the model says that it is ready; one that has nothing to say is."""
        return self._stub.is_ready()

    def close(self) -> None:
        """Finalize the model, and end the process."""
        with self._lock:
            self._closing.set()
        self._stub.close(within_s=self._ends_within_s)
        self._reader.join()

    def abort(self) -> None:
        """Kill the process: what it executes fails, and it is not started again."""
        with self._lock:
            self._closing.set()
        logger.error("the process of %s executes without an end: killed", self._host.instance)
        self._stub.kill()

    def _start(self) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._stub = Stub(self._setup, host=self._host)
        self._stub.start()

    def _serve(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            self._stub.serve()
            if self._closing.is_set():
                return
            if self._stub.has_executed:
                pause_s = _FIRST_PAUSE_S
            logger.error("the process of %s died; it is started again in %s s", self._host.instance, pause_s)
            while not self._stub.alive:
                if self._closing.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                try:
                    self._start()
                except Exception:
                    logger.exception("the process of %s did not start", self._host.instance)
