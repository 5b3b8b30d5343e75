"""Process: a python model in a process of its own, where a crash takes nothing else with it.

Tensors are copied on their way. What the model asks of others (BLS, loads) travels back to the server, so
that it finds the same models, and so do metrics of its own.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from genserve.backends.python.calls import Wait
from genserve.backends.python.channel import Channel, portable_error, portable_inference, portable_response
from genserve.backends.python.host import Host
from genserve.backends.python.metric_families import MetricFamilies
from genserve.backends.python.process_side import ModelSetup, run_model
from genserve.backends.python.remote_metrics import Measures
from genserve.errors import Closed, GenserveError, InferenceError, Status
from genserve.inference import Inference, InferenceRequest, InferenceResponse

__all__ = ["ModelProcess"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
_READY_WITHIN_S = 6.0  # more than the model itself is given
_MAY_BLOCK = frozenset({"load", "unload", "is_ready"})  # of the methods of `Door`


class ModelProcess:
    """Runs a PythonModel elsewhere; its methods are those of PythonModel.

    When the process dies, its requests fail, and it is started anew, after a pause that doubles each time.
    """

    def __init__(self, setup: ModelSetup, *, host: Host) -> None:
        """Start the process, and wait until the model is initialized.

        Raises:
            InferenceError: what the model raised.
        """
        self._setup = setup
        self._host = host
        self._pending: dict[int, Inference] = {}
        self._calls: dict[int, Wait] = {}
        self._executed: Future[list[int]] | None = None
        self._ready: dict[int, Future[bool]] = {}
        self._measures = Measures(host.families or MetricFamilies())
        self._closing = threading.Event()
        self._alive = False
        self._start()
        self._reader = threading.Thread(target=self._serve, name=f"process-{host.instance}", daemon=True)
        self._reader.start()

    def execute(self, batch: Sequence[Inference]) -> None:
        """Have the model answer a batch.

        Raises:
            InferenceError: what the model raised; or its process is dead.
        """
        executed = self._executed = Future[list[int]]()  # before the look: whoever declares it dead fails it
        if not self._alive:
            raise self._dead()
        asked = [(self._number(inference), portable_inference(inference)) for inference in batch]
        self._channel.send(("execute", asked))
        rescheduled = executed.result()
        for inference in batch:
            inference.reschedule = id(inference) in rescheduled

    def is_ready(self) -> bool:
        """Whether the process lives, and the model says that it is ready; one that has nothing to say is."""
        if not (self._alive and self._says_ready):
            return self._alive
        answer = Future[bool]()
        self._ready[id(answer)] = answer
        self._channel.send(("is_ready", id(answer)))
        try:
            return answer.result(_READY_WITHIN_S)
        except TimeoutError:
            return False
        finally:
            self._ready.pop(id(answer), None)

    def close(self) -> None:
        """Finalize the model, and end the process."""
        self._closing.set()
        self._channel.send(("close",))
        self._process.join()
        self._reader.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        host = replace(self._host, door=None, families=None, executor=None)
        arguments = (there, self._setup, host, logging.getLogger().getEffectiveLevel())
        self._process = context.Process(
            target=run_model, args=arguments, name=self._host.instance, daemon=True
        )
        self._process.start()
        there.close()
        self._channel = Channel(here)
        try:
            while (message := self._channel.receive())[0] != "started":
                self._handle(message)  # initialize, too, logs, loads and measures
            _, error, self._says_ready = message
        except EOFError:
            error = self._dead()
        if error is not None:
            self._process.join()
            here.close()
            raise error
        self._alive = True

    def _serve(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            if self._read():
                pause_s = _FIRST_PAUSE_S
            self._fail_all()
            if self._closing.is_set():
                return
            logger.error("the process of %s died; it is started again in %s s", self._host.instance, pause_s)
            while not self._alive:
                if self._closing.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                try:
                    self._start()
                except GenserveError:
                    logger.exception("the process of %s did not start", self._host.instance)

    def _read(self) -> bool:
        """Handle what the process says until it is gone; return whether it has executed anything."""
        has_executed = False
        while True:
            try:
                message = self._channel.receive(_LOOK_EVERY_S)
            except (EOFError, OSError):
                return has_executed
            if message is None:
                self._look()
                continue
            has_executed |= message[0] == "executed"
            self._handle(message)

    def _handle(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        getattr(self, f"_on_{kind}")(*rest)

    def _on_response(self, number: int, response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
        inference = self._pending.pop(number, None) if final else self._pending.get(number)
        try:
            if inference is not None:
                inference.send(response, final=final)
        except Closed:
            return

    def _on_executed(self, error: InferenceError | None, rescheduled: list[int]) -> None:
        executed, self._executed = self._executed, None
        if executed is None:
            return
        if error is not None:
            executed.set_exception(error)
        else:
            executed.set_result(rescheduled)

    def _on_log(self, name: str, level: int, text: str) -> None:
        logging.getLogger(name).log(level, "%s", text)

    def _on_call(self, number: int, request: InferenceRequest) -> None:
        """Ask another model for the process."""
        channel, executor = self._channel, self._host.executor

        def receive(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
            if final and (wait := self._calls.pop(number, None)):
                wait.end()
            channel.send(("answer", number, response and portable_response(response), final))

        inference = Inference(request=request, on_response=receive)
        self._calls[number] = Wait(inference, None if self._host.decoupled else executor)
        self._on_ask(number, "submit", (inference,), {})

    def _on_cancel_call(self, number: int) -> None:
        if wait := self._calls.get(number):
            wait.inference.cancel()

    def _on_ask(self, number: int, method: str, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        act = partial(getattr(self._host.door, method), *args, **fields)
        if method in _MAY_BLOCK:
            threading.Thread(target=self._answer, args=[number, act], daemon=True).start()
        else:
            self._answer(number, act)

    def _on_measure(self, number: int, *what: Any) -> None:
        """Do something with a metric for the process."""
        self._answer(number, partial(self._measures.measure, *what))

    def _on_ready(self, number: int, ready: bool) -> None:  # noqa: FBT001
        if answer := self._ready.pop(number, None):
            answer.set_result(ready)

    def _answer(self, number: int, act: Callable[[], object]) -> None:
        reply: object
        try:
            reply = act()
        except GenserveError as error:
            reply = portable_error(error)
        except ValueError as error:
            reply = ValueError(*error.args)  # without the frames that it refers to
        self._channel.send(("reply", number, reply))

    def _look(self) -> None:
        for number, wait in list(self._calls.items()):
            try:
                wait.look()
            except InferenceError as error:
                if self._calls.pop(number, None):
                    wait.end()
                    self._channel.send(("answer", number, InferenceResponse(error=error), True))
                    wait.inference.cancel()

    def _fail_all(self) -> None:
        self._alive = False
        self._measures.forget()
        for number in list(self._ready):
            self._on_ready(number, False)  # noqa: FBT003
        executed, self._executed = self._executed, None
        if executed is not None and not executed.done():
            executed.set_exception(self._dead())
        while self._pending:
            self._pending.popitem()[1].fail(self._dead())
        while self._calls:
            wait = self._calls.popitem()[1]
            wait.end()
            wait.inference.cancel()

    def _number(self, inference: Inference) -> int:
        number = id(inference)
        if number not in self._pending:  # or it was rescheduled
            self._pending[number] = inference
            inference.when_cancelled(lambda: self._channel.send(("cancel", number)))
        return number

    def _dead(self) -> InferenceError:
        return InferenceError(
            f"Stub process '{self._host.instance}' is not healthy.",
            status=Status.INTERNAL,
            remedy="the process of the model died and is being started again; the log says when and why",
        )
