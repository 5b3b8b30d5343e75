"""Stub process: runs a Python model in its own process and talks to the server over a pipe."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeAlias

from genserve.backends.python.custom_metrics import RemoteCustomMetrics
from genserve.backends.python.model_context import ModelContext
from genserve.backends.python.python_model import ModelSetup, PythonModel
from genserve.backends.python.stub_channel import Channel, portable_error, portable_request, portable_response
from genserve.errors import GenserveError, InferenceError
from genserve.inference import Backlog, Inference, InferenceRequest, InferenceResponse, InferenceServer

logger = logging.getLogger(__name__)

_TRACEBACKS = logging.Formatter()
_EXIT_TIMEOUT_S = 5.0  # after the server has gone

# The requests of a batch: number, request, and whether its model waits until the server can take a response.
_Requests: TypeAlias = list[tuple[int, InferenceRequest, bool]]


def run_model(pipe: Connection[Any, Any], setup: ModelSetup, context: ModelContext) -> None:
    """Run the stub process: the model runs on the main thread."""
    multiprocessing.current_process().daemon = False  # so that the model may start processes
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)    # which are killed with this one
    # A terminal sends these to all processes of the server, which ends this one itself.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(pipe)
    logging.basicConfig(handlers=[_LogHandler(channel)])
    # The server filters by level, since its settings may change.
    logging.getLogger("genserve").setLevel(logging.DEBUG)
    connection = _ServerConnection(channel)
    context.server = connection.server
    context.metrics = RemoteCustomMetrics(connection.server.measure)
    threading.Thread(target=connection.read, daemon=True).start()
    try:
        model = PythonModel(setup, context=context)
    except GenserveError as failure:
        channel.send(("started", portable_error(failure), False))
        return
    connection.model = model
    channel.send(("started", None, model.has_ready_check))
    while (work := connection.work.get()) is not None:
        channel.send(("executed", *connection.execute(model, *work)))
        del work  # do not keep it alive while waiting for the next one
    model.close()
    if connection.lost:
        _kill_group()


def _kill_group() -> None:
    """Kill this process and the processes that the model has started, since the server is gone."""
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)


class _ServerConnection:
    """Reads the messages of the server, and executes its batches."""

    def __init__(self, channel: Channel) -> None:
        self.work: SimpleQueue[tuple[int, _Requests] | None] = SimpleQueue()
        self.server = _RemoteServer(channel)
        self.model: PythonModel | None = None
        self.lost = False   # the server has gone
        self._channel = channel
        self._inferences: dict[int, Inference] = {}

    def execute(
        self, model: PythonModel, number: int, requests: _Requests
    ) -> tuple[int, InferenceError | None, list[int]]:
        """Execute a batch; return its number, the model's error, and the numbers of rescheduled requests."""
        batch = [self._inference(*request) for request in requests]
        error: InferenceError | None = None
        try:
            model.execute(batch)
        except InferenceError as raised:
            error = portable_error(raised)
            for inference in batch:
                inference.fail(error)  # its sender may still be held
        rescheduled = [
            request[0] for request, inference in zip(requests, batch, strict=True) if inference.reschedule
        ]
        return number, error, rescheduled

    def _inference(self, number: int, request: InferenceRequest, has_backlog: bool) -> Inference:  # noqa: FBT001
        known = self._inferences.get(number)
        if known is not None:
            known.request, known.inputs, known.reschedule = request, dict(request.inputs), False
            return known

        def send(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
            if final:
                self._inferences.pop(number, None)
            if inference.backlog is not None:
                if final:
                    inference.backlog.lift()
                else:
                    inference.backlog.add(inference)  # until the server sends "clear"
            self._channel.send(("response", number, response and portable_response(response), final))

        inference = Inference(request=request, on_response=send)
        inference.backlog = Backlog() if has_backlog else None
        self._inferences[number] = inference
        return inference

    def read(self) -> None:
        """Handle the messages of the server; when it has gone, end the process, by force after a timeout."""
        while True:
            try:
                message = self._channel.receive()
            except (EOFError, OSError):
                self.lost = True
                break
            try:
                self._handle(message)
            except Exception:  # the next messages must be read
                logger.exception("a message (%s) of the server failed", message[0])
        self.work.put(None)
        time.sleep(_EXIT_TIMEOUT_S)
        _kill_group()
        os._exit(1)  # the model is stuck

    def _handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("execute", number, requests):
                self.work.put((number, requests))
            case ("cancel", number):
                if inference := self._inferences.get(number):
                    inference.cancel()
            case ("clear", number):
                inference = self._inferences.get(number)
                if inference is not None and inference.backlog is not None:
                    inference.backlog.remove(inference)
            case ("answer", number, response, final):
                self.server.answer(number, response, final=final)
            case ("reply", number, reply):
                self.server.reply(number, reply)
            case ("is_ready", number):
                threading.Thread(target=self._send_ready, args=[number], daemon=True).start()
            case ("close",):
                self.work.put(None)

    def _send_ready(self, number: int) -> None:
        assert self.model is not None  # the server asks after "started"
        self._channel.send(("ready", number, self.model.is_ready()))


class _RemoteServer(InferenceServer):
    """The server, as seen from the stub process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._replies: dict[int, Future[Any]] = {}
        self._calls: dict[int, Inference] = {}

    def submit(self, inference: Inference) -> None:
        number = next(self._numbers)
        self._calls[number] = inference
        try:
            request = portable_request(inference.request)
            self._wait(number, ("call", number, request, inference.takes_stream))
        except GenserveError:
            self._calls.pop(number, None)
            raise
        # Now, as the server must know the call before it is cancelled.
        inference.when_cancelled(lambda: self._channel.send(("cancel_call", number)))

    def load(self, name: str, *, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        self._ask("load", name, config=config, files=files)

    def unload(self, name: str, *, dependents: bool = False) -> None:
        self._ask("unload", name, dependents=dependents)

    def is_ready(self, name: str, version: int = -1) -> bool:
        return bool(self._ask("is_ready", name, version))

    def measure(self, *arguments: Any) -> Any:
        number = next(self._numbers)
        return self._wait(number, ("measure", number, *arguments))

    def answer(self, number: int, response: InferenceResponse | None, *, final: bool) -> None:
        inference = self._calls.pop(number, None) if final else self._calls.get(number)
        if inference is not None:
            inference.send(response, final=final)

    def reply(self, number: int, reply: object) -> None:
        self._replies.pop(number).set_result(reply)

    def _ask(self, method: str, *args: object, **fields: object) -> Any:
        number = next(self._numbers)
        return self._wait(number, ("ask", number, method, args, fields))

    def _wait(self, number: int, message: tuple[Any, ...]) -> Any:
        future: Future[Any] = Future()
        self._replies[number] = future
        self._channel.send(message)
        reply = future.result()
        if isinstance(reply, (GenserveError, ValueError)):
            raise reply
        return reply


class _LogHandler(logging.Handler):
    """Sends log records to the server: the message, and separately the traceback."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        traceback = _TRACEBACKS.formatException(record.exc_info) if record.exc_info else ""
        self._channel.send(("log", record.name, record.levelno, record.getMessage(), traceback))
