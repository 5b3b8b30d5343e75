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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

from genserve.backends.python.custom_metrics import RemoteFamilies
from genserve.backends.python.model_context import Host
from genserve.backends.python.python_model import PythonModel
from genserve.backends.python.stub_channel import Channel, portable_error, portable_request, portable_response
from genserve.errors import GenserveError, InferenceError
from genserve.inference import Backlog, Inference, InferenceRequest, InferenceResponse, InferenceServer

__all__ = ["ModelSetup", "run_model"]


logger = logging.getLogger(__name__)

_TRACEBACKS = logging.Formatter()
_ENDS_WITHIN_S = 30.0  # once the server is gone

# The requests of a batch: the number of each, and whether there is to be room for each response to it.
_Asked: TypeAlias = list[tuple[int, InferenceRequest, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """What a process needs to make a PythonModel."""

    path: Path
    folders: tuple[Path, ...]
    arguments: Mapping[str, str]
    iterative: bool


def run_model(pipe: Connection[Any, Any], setup: ModelSetup, host: Host) -> None:
    """Be the process: the model runs on the main thread."""
    multiprocessing.current_process().daemon = False  # the model may start processes itself
    for told_to_all in (signal.SIGINT, signal.SIGHUP):  # by a terminal; the server says when to stop
        signal.signal(told_to_all, signal.SIG_IGN)
    channel = Channel(pipe)
    logging.basicConfig(handlers=[_LogHandler(channel)])
    # The server drops what nobody wants to read: its settings may change.
    logging.getLogger("genserve").setLevel(logging.DEBUG)
    elsewhere = _Elsewhere(channel)
    host.server = elsewhere.server
    host.families = RemoteFamilies(elsewhere.server.measure)
    threading.Thread(target=elsewhere.read, daemon=True).start()
    try:
        model = PythonModel(
            setup.path, folders=setup.folders, host=host, arguments=setup.arguments, iterative=setup.iterative
        )
    except GenserveError as failure:
        channel.send(("started", portable_error(failure), False))
        return
    elsewhere.model = model
    channel.send(("started", None, model.says_ready))
    while (work := elsewhere.work.get()) is not None:
        channel.send(("executed", *elsewhere.execute(model, *work)))
        del work  # not kept alive while it waits for the next one
    model.close()


class _Elsewhere:
    """The server, as its model's process sees it."""

    def __init__(self, channel: Channel) -> None:
        self.work: SimpleQueue[tuple[int, _Asked] | None] = SimpleQueue()
        self.server = _RemoteServer(channel)
        self.model: PythonModel | None = None
        self._channel = channel
        self._inferences: dict[int, Inference] = {}

    def execute(
        self, model: PythonModel, number: int, asked: _Asked
    ) -> tuple[int, InferenceError | None, list[int]]:
        """Execute a batch; return its number, what the model raised, and what is to be executed again."""
        batch = [self._inference(*one) for one in asked]
        error: InferenceError | None = None
        try:
            model.execute(batch)
        except InferenceError as raised:
            error = portable_error(raised)
            for inference in batch:
                inference.fail(error)  # whoever still has its sender can say no more
        rescheduled = [of for (of, *_), inference in zip(asked, batch, strict=True) if inference.reschedule]
        return number, error, rescheduled

    def _inference(self, number: int, request: InferenceRequest, needs_room: bool) -> Inference:  # noqa: FBT001
        known = self._inferences.get(number)
        if known is not None:
            known.request, known.inputs, known.reschedule = request, dict(request.inputs), False
            return known

        def send(response: InferenceResponse | None, final: bool) -> None:  # noqa: FBT001
            if final:
                self._inferences.pop(number, None)
            if made.backlog is not None:
                if final:
                    made.backlog.lift()
                else:
                    made.backlog.add(made)  # until the server says "clear"
            self._channel.send(("response", number, response and portable_response(response), final))

        made = Inference(request=request, on_response=send, model_name=request.model_name)
        made.backlog = Backlog() if needs_room else None
        self._inferences[number] = made
        return made

    def read(self) -> None:
        """Handle what the server says until it is gone; the process does not outlive it for long."""
        while True:
            try:
                message = self._channel.receive()
            except (EOFError, OSError):
                break
            try:
                self._handle(message)
            except Exception:  # it concerns one message: the others are waited for
                logger.exception("a message (%s) of the server failed", message[0])
        self.work.put(None)
        time.sleep(_ENDS_WITHIN_S)
        os._exit(1)  # the model is stuck, and nobody is left to kill it

    def _handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("execute", number, asked):
                self.work.put((number, asked))
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
                threading.Thread(target=self._say_ready, args=[number], daemon=True).start()
            case ("close",):
                self.work.put(None)

    def _say_ready(self, number: int) -> None:
        assert self.model is not None  # or it would not be asked
        self._channel.send(("ready", number, self.model.is_ready()))


class _RemoteServer(InferenceServer):
    """The server, as seen from the process of a model."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._replies: dict[int, Future[Any]] = {}
        self._calls: dict[int, Inference] = {}

    def submit(self, inference: Inference) -> None:
        number = next(self._numbers)
        self._calls[number] = inference
        inference.when_cancelled(lambda: self._channel.send(("cancel_call", number)))
        try:
            self._wait(number, ("call", number, portable_request(inference.request)))
        except GenserveError:
            self._calls.pop(number, None)
            raise

    def load(self, name: str, *, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        self._ask("load", name, config=config, files=files)

    def unload(self, name: str, *, dependents: bool = False) -> None:
        self._ask("unload", name, dependents=dependents)

    def is_ready(self, name: str, version: int = -1) -> bool:
        return bool(self._ask("is_ready", name, version))

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        return bool(self._ask("is_decoupled", name, version))

    def measure(self, *what: Any) -> Any:
        number = next(self._numbers)
        return self._wait(number, ("measure", number, *what))

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
        replied: Future[Any] = Future()
        self._replies[number] = replied
        self._channel.send(message)
        reply = replied.result()
        if isinstance(reply, (GenserveError, ValueError)):
            raise reply
        return reply


class _LogHandler(logging.Handler):
    """Lets the server log what is logged in the process: the message, and the traceback apart from it."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        traceback = _TRACEBACKS.formatException(record.exc_info) if record.exc_info else ""
        self._channel.send(("log", record.name, record.levelno, record.getMessage(), traceback))
