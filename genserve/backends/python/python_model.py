"""Python model: one `TritonPythonModel`, and the contract for its `execute`."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from genserve.backends.python.model_context import (
    CONTEXT_GLOBAL,
    CURRENT_BATCH,
    CURRENT_CONTEXT,
    ModelContext,
    Phase,
    RunningBatch,
)
from genserve.backends.python.model_package import ModelPackage
from genserve.backends.python.pb_utils import InferenceRequest, InferenceResponse, ModelConfig
from genserve.backends.python.pb_utils.pb_error import TritonModelException
from genserve.errors import GenserveError, InferenceError, Status, exception_text
from genserve.inference import CURRENT_EXECUTOR, Inference

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 10.0
_MOST_FRAMES = 100  # frames of a model's traceback in an answer
_TRACED_MODULE = "genserve.backends.python.pb_utils.pb_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """The code of a model, and how to initialize it."""

    path: Path                      # the model.py
    folders: tuple[Path, ...]       # searched for other modules
    arguments: Mapping[str, str]    # for `initialize`
    iterative: bool                 # whether it may reschedule requests


class PythonModel:
    """One `TritonPythonModel`. `execute` and `close` are called on the thread that created it."""

    def __init__(self, setup: ModelSetup, *, context: ModelContext) -> None:
        """Import the file, create the object and call its `initialize`.

        Raises:
            InferenceError: INTERNAL; the error of the file or `initialize`, with its traceback.
        """
        self._context = context
        self._iterative = setup.iterative
        self._loop: EventLoop | None = None
        self._lock = threading.Lock()  # for the loop, which any thread may create
        self._package = ModelPackage(
            setup.path, model=context.model, folders=setup.folders, module_globals={CONTEXT_GLOBAL: context}
        )
        self._path = setup.path
        context.package = self._package.name
        CURRENT_CONTEXT.set(context)
        # For `asyncio.get_event_loop()` in `execute`, which in Triton runs on a main thread with a loop.
        self._thread_loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._thread_loop)
        try:
            self._model = _model_class(self._package, setup.path)()
            if hasattr(self._model, "initialize"):
                self._model.initialize(dict(setup.arguments))
        except BaseException as error:  # KeyboardInterrupt too: the code is not ours
            self._release()
            raise _load_error(error) from error
        context.phase = Phase.RUNNING

    def execute(self, batch: Sequence[Inference]) -> None:
        """Execute a batch.

        Raises:
            InferenceError: INTERNAL; the model raised, or returned an invalid value.
        """
        requests = [InferenceRequest._of(inference, self._context) for inference in batch]
        self._context.batch = running = RunningBatch(batch)
        outer = CURRENT_BATCH.set(running)
        try:
            if not hasattr(self._model, "execute"):
                raise _ContractError(f"Python model {self._path} does not implement `execute` method.")
            returned = self._model.execute(requests)
            if isinstance(returned, list) or not asyncio.iscoroutine(returned):
                self._send_returned(returned, requests)
            else:
                self._run(returned, requests)
        except BaseException as error:  # KeyboardInterrupt too: the code is not ours
            raise self._failed(error, requests) from error
        finally:
            CURRENT_BATCH.reset(outer)
            self._context.batch = None

    @property
    def has_ready_check(self) -> bool:
        """Whether the model has a method `is_ready`."""
        return "is_ready" in dir(self._model)

    def is_ready(self) -> bool:
        """Whether the model's `is_ready`, if it has one, returns True. From any thread."""
        if self._context.phase is Phase.CLOSING:
            return False
        try:
            answer = self._model.is_ready() if self.has_ready_check else True
            if asyncio.iscoroutine(answer):
                answer = self._await(answer, timeout_s=_READY_TIMEOUT_S)
        except BaseException:
            logger.exception("is_ready of %s failed", self._context.instance)
            return False
        return answer is True

    def abort(self) -> bool:
        """Return False: a running `execute` cannot be interrupted."""
        return False

    def close(self) -> None:
        """Call its `finalize`, and remove its modules.

        Modules are reference cycles, so their objects are freed by the next garbage collection.
        """
        self._context.phase = Phase.CLOSING
        with self._lock:
            loop = self._loop
        if loop is not None:
            loop.close()
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except BaseException:
            logger.exception("finalize of %s failed", self._context.instance)
        del self._model
        self._release()

    def _release(self) -> None:
        asyncio.set_event_loop(None)
        self._thread_loop.close()
        self._package.unload()

    def _run(self, coroutine: Coroutine[Any, Any, Any], requests: Sequence[InferenceRequest]) -> None:
        if not self._context.decoupled:
            self._send_returned(self._event_loop().submit(coroutine).result(), requests)
            return

        def start() -> Future[Any]:
            CURRENT_EXECUTOR.set(None)  # the instance does not wait for the coroutine
            return self._event_loop().submit(coroutine)

        def ended(future: Future[Any]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                failure = self._failed(error, requests)
                for request in requests:
                    request._fail(failure)

        copy_context().run(start).add_done_callback(ended)

    def _await(self, coroutine: Coroutine[Any, Any, Any], *, timeout_s: float) -> Any:
        future = self._event_loop().submit(coroutine)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()  # if it has timed out

    def _event_loop(self) -> EventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = EventLoop(self._context.instance)
            return self._loop

    def _send_returned(self, returned: object, requests: Sequence[InferenceRequest]) -> None:
        responses = [None] * len(requests) if returned is None else self._validated(returned, requests)
        for request, response in zip(requests, responses, strict=True):
            if response is not None:
                request._respond(response)
            elif request._inference is not None and request._inference.reschedule:
                self._reschedule(request)
            elif not self._context.decoupled and not request._has_sender():
                request._fail(self._failed(_ContractError("execute has left a request unanswered."), ()))

    def _validated(
        self, returned: object, requests: Sequence[InferenceRequest]
    ) -> list[InferenceResponse | None]:
        if self._context.decoupled:
            raise _ContractError(
                f"Python model '{self._context.instance}' is using the decoupled mode and the execute "
                "function must return None."
            )
        if not isinstance(returned, list):
            raise _ContractError(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(requests):
            raise _ContractError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:"
                f"{len(returned)}\n"
            )
        for request, response in zip(requests, returned, strict=True):
            if response is not None:
                _check_response(request, response)
        return returned

    def _reschedule(self, request: InferenceRequest) -> None:
        if self._iterative:
            request._release_sender()
            return
        request._fail(
            InferenceError(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
                "configured to handle such a flag.",
                remedy="set sequence_batching { iterative_sequence: true } in its config.pbtxt",
            )
        )

    def _failed(self, error: BaseException, requests: Sequence[InferenceRequest]) -> InferenceError:
        # A model that was called for cancelled requests fails as its calls were cancelled with them.
        is_cancelled = bool(requests) and all(request.is_cancelled() for request in requests)
        level = logging.DEBUG if is_cancelled else logging.ERROR
        logger.log(level, "model %s failed", self._context.model, exc_info=error)
        for request in requests:
            request._close()
        text = str(error) if isinstance(error, _ContractError) else _failure_text(error)
        return InferenceError(
            f"Failed to process the request(s) for model '{self._context.instance}', message: {text}",
            status=Status.INTERNAL,
        )


def complete_config(
    path: Path, *, folders: Sequence[Path], context: ModelContext, config: str
) -> dict[str, Any]:
    """Return a config completed by the model's `auto_complete_config`.

    The file is imported for this call only.

    Args:
        path: the model.py.
        folders: searched for other modules.
        context: the model's context, without a server.
        config: JSON.

    Raises:
        InferenceError: INTERNAL; the error of the file or the function, with its traceback.
    """
    package = ModelPackage(
        path, model=context.model, folders=folders, module_globals={CONTEXT_GLOBAL: context}
    )
    context.package = package.name

    def complete() -> ModelConfig:
        CURRENT_CONTEXT.set(context)
        completed: Any = ModelConfig(config)
        model = _model_class(package, path)
        if hasattr(model, "auto_complete_config"):
            completed = model.auto_complete_config(completed)
        if isinstance(completed, ModelConfig):
            return completed
        raise _ContractError(
            f"auto_complete_config function in model '{context.model}' must return a valid pb.ModelConfig "
            "object."
        )

    try:
        return copy_context().run(complete).as_dict()
    except BaseException as error:
        raise _load_error(error) from error
    finally:
        package.unload()


class _ContractError(Exception):
    """A model violates the contract of the server; the text is Triton's, without a traceback."""

    def __init__(self, text: str, *, remedy: str = "") -> None:
        super().__init__(text)
        self.remedy = remedy


def _model_class(package: ModelPackage, path: Path) -> Any:
    if not path.is_file():
        raise _ContractError(f"Python model file not found in '{path}'")
    module = package.load()
    if not hasattr(module, "TritonPythonModel"):
        name = f"{path.parent.name}.{path.stem}"
        raise _ContractError(
            f"AttributeError: module '{name}' has no attribute 'TritonPythonModel'",
            remedy=f"define `class TritonPythonModel` in {path}",
        )
    return module.TritonPythonModel


def _load_error(error: BaseException) -> GenserveError:
    text = str(error) if isinstance(error, _ContractError) else _failure_text(error)
    return InferenceError(text, status=Status.INTERNAL, remedy=_load_remedy(error))


def _load_remedy(error: BaseException) -> str:
    match error:
        case _ContractError():
            return error.remedy
        case SyntaxError(filename=str()):
            return f"correct line {error.lineno} of {error.filename}"
        case ModuleNotFoundError(name=str()):
            where = f"into {sys.prefix}, or put the module into the model's folder"
            return f"install the package of {error.name!r} {where}"
    return ""


def _check_response(request: InferenceRequest, response: object) -> None:
    if request._inference is not None and request._inference.reschedule:
        raise _ContractError(
            "Expected a None object in the execute function return list for reschduled request, found type "
            f"'{type(response)}'."
        )
    if not isinstance(response, InferenceResponse):
        raise _ContractError(
            "Expected an 'InferenceResponse' object in the execute function return list, found type "
            f"'{type(response)}'."
        )
    try:
        request._check_answerable()
    except TritonModelException as error:
        raise _ContractError(str(error)) from None


def _failure_text(error: BaseException) -> str:
    """Return `ValueError: boom` and the traceback in Triton's form, the innermost frame first.

    Frames of genserve are left out.
    """
    frames = _frames(error)
    where = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames))
    return exception_text(error) + (f"\n\nAt:\n{where}" if where else "")


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    step = error.__traceback__
    while step is not None and CONTEXT_GLOBAL not in step.tb_frame.f_globals:
        step = step.tb_next
    frames = deque(_model_frames(step), maxlen=_MOST_FRAMES)    # the innermost ones
    return list(traceback.StackSummary.extract(iter(frames)))


def _model_frames(step: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames outside of genserve, and of the only module of pb_utils that is Python in Triton."""
    while step is not None:
        name = step.tb_frame.f_globals.get("__name__", "")
        if not name.startswith("genserve.") or name == _TRACED_MODULE:
            yield step.tb_frame, step.tb_lineno
        step = step.tb_next


class EventLoop:
    """An asyncio event loop on its own thread. Coroutines run in the context of the caller of `submit`."""

    def __init__(self, name: str, *, close_timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Start the thread.

        Args:
            name: the instance's name.
            close_timeout_s: how long `close` waits for coroutines to be cancelled.
        """
        self._close_timeout_s = close_timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"asyncio-{name}", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Schedule a coroutine, from another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel all coroutines, and wait for them until the timeout."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            logger.error(
                "%s: a coroutine does not react to its cancellation and is abandoned", self._thread.name
            )

    def _run(self) -> None:
        # The runner closes the loop when `close` has stopped it.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            while True:
                # A coroutine raised it, and its future has it too; the loop goes on for the other coroutines.
                with suppress(KeyboardInterrupt, SystemExit):
                    runner.get_loop().run_forever()
                    return
