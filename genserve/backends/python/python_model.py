"""Python model: one `TritonPythonModel`, and the contract for its `execute`."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from genserve.backends.python.model_context import CONTEXT_GLOBAL, CURRENT_CONTEXT, Host, Phase
from genserve.backends.python.model_package import ModelPackage
from genserve.backends.python.pb_utils import InferenceRequest, InferenceResponse, ModelConfig
from genserve.backends.python.pb_utils.pb_error import TritonModelException
from genserve.errors import GenserveError, InferenceError, Status
from genserve.inference import CURRENT_EXECUTOR, Inference

__all__ = ["EventLoop", "PythonModel", "complete_config", "failure_text"]


logger = logging.getLogger(__name__)

_ENDS_WITHIN_S = 10.0


class EventLoop:
    """A running asyncio event loop. What it was given sees the context of whoever gave it."""

    def __init__(self, name: str, *, ends_within_s: float = _ENDS_WITHIN_S) -> None:
        """Start the thread.

        Args:
            name: of the instance it belongs to.
            ends_within_s: how long `close` waits for what does not let itself be cancelled.
        """
        self._ends_within_s = ends_within_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"asyncio-{name}", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine beside the others; from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what runs, and wait for its end: not for ever."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self._ends_within_s)
        if self._thread.is_alive():
            logger.error("%s: a coroutine refuses to be cancelled; it is left behind", self._thread.name)

    def _run(self) -> None:
        # Runner would close the loop on its own; here `close` says when.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


_SHOWN = "genserve.backends.python.pb_utils.config"


def failure_text(error: BaseException) -> str:
    """Return `ValueError: boom`, and below it where, the innermost frame first.

    The frames are those of the model and of what it called; ours in front of them are left out.
    """
    text = str(error) or "<EMPTY MESSAGE>"
    frames = _frames(error)
    where = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames))
    return f"{type(error).__name__}: {text}" + (f"\n\nAt:\n{where}" if where else "")


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    step = error.__traceback__
    while step is not None and CONTEXT_GLOBAL not in step.tb_frame.f_globals:
        step = step.tb_next
    return list(traceback.StackSummary.extract(_foreign(step)))


def _foreign(step: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that are not ours. Those of pb_utils are C++ in Triton, and not shown, but for one."""
    while step is not None:
        name = step.tb_frame.f_globals.get("__name__", "")
        if not name.startswith("genserve.") or name == _SHOWN:
            yield step.tb_frame, step.tb_lineno
        step = step.tb_next




_READY_WITHIN_S = 5.0


class PythonModel:
    """One object of a model's class. `execute` and `close` are called on the thread that made it."""

    def __init__(
        self,
        path: Path,
        *,
        folders: Sequence[Path],
        host: Host,
        arguments: Mapping[str, str],
        iterative: bool = False,
    ) -> None:
        """Import the file, make the object and call its `initialize`.

        Args:
            path: the model.py.
            folders: where the modules beside it are looked for.
            host: what its code may reach.
            arguments: of `initialize`.
            iterative: whether it may ask for a request to be executed again.

        Raises:
            InferenceError: INTERNAL; what the file or `initialize` raised, and where.
        """
        self._host = host
        self._iterative = iterative
        self._loop: EventLoop | None = None
        self._lock = threading.Lock()  # of the loop, which any thread may be the first to need
        self._file = ModelPackage(path, model=host.model, folders=folders, names={CONTEXT_GLOBAL: host})
        self._path = path
        host.package = self._file.package
        CURRENT_CONTEXT.set(host)
        # For `asyncio.get_event_loop()` in execute: in Triton it runs on a main thread, which has a loop.
        self._thread_loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._thread_loop)
        try:
            self._model = _model_class(self._file, path)()
            if hasattr(self._model, "initialize"):
                self._model.initialize(dict(arguments))
        except (Exception, SystemExit) as error:
            self._let_go()
            raise _load_error(error) from error
        host.phase = Phase.RUNNING

    def execute(self, batch: Sequence[Inference]) -> None:
        """Have the model answer a batch.

        Raises:
            InferenceError: INTERNAL; the model raised, or returned what it must not.
        """
        requests = [InferenceRequest._of(inference, self._host) for inference in batch]
        try:
            if not hasattr(self._model, "execute"):
                raise _BrokenContract(f"Python model {self._path} does not implement `execute` method.")
            returned = self._model.execute(requests)
            if isinstance(returned, list) or not asyncio.iscoroutine(returned):
                self._take_returned(returned, requests)
            else:
                self._run(returned, requests)
        except (Exception, SystemExit) as error:
            raise self._failed(error, requests) from error

    @property
    def says_ready(self) -> bool:
        """Whether the model has something to say on whether it is ready."""
        return "is_ready" in dir(self._model)

    def is_ready(self) -> bool:
        """Whether the model says that it is; one that has nothing to say is. From any thread."""
        if self._host.phase is Phase.CLOSING:
            return False
        try:
            answer = self._model.is_ready() if self.says_ready else True
            if asyncio.iscoroutine(answer):
                answer = self._awaited(answer, within_s=_READY_WITHIN_S)
        except Exception:
            logger.exception("is_ready of %s failed", self._host.instance)
            return False
        return answer is True

    def close(self) -> None:
        """Call its `finalize`, and forget its code.

        Modules refer to themselves: what they hold goes with the next garbage collection.
        """
        self._host.phase = Phase.CLOSING
        with self._lock:
            loop = self._loop
        if loop is not None:
            loop.close()
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except (Exception, SystemExit):
            logger.exception("finalize of %s failed", self._host.instance)
        del self._model
        self._let_go()

    def _let_go(self) -> None:
        asyncio.set_event_loop(None)
        self._thread_loop.close()
        self._file.forget()

    def _run(self, coroutine: Coroutine[Any, Any, Any], requests: Sequence[InferenceRequest]) -> None:
        if not self._host.decoupled:
            self._take_returned(self._event_loop().submit(coroutine).result(), requests)
            return

        def start() -> Future[Any]:
            CURRENT_EXECUTOR.set(None)  # the instance does not wait for it
            return self._event_loop().submit(coroutine)

        def ended(future: Future[Any]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                failure = self._failed(error, requests)
                for request in requests:
                    request._fail(failure)

        copy_context().run(start).add_done_callback(ended)

    def _awaited(self, coroutine: Coroutine[Any, Any, Any], *, within_s: float) -> Any:
        future = self._event_loop().submit(coroutine)
        try:
            return future.result(within_s)
        finally:
            future.cancel()  # if it is not done in time

    def _event_loop(self) -> EventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = EventLoop(self._host.instance)
            return self._loop

    def _take_returned(self, returned: object, requests: Sequence[InferenceRequest]) -> None:
        responses = [None] * len(requests) if returned is None else self._checked(returned, requests)
        for request, response in zip(requests, responses, strict=True):
            if response is not None:
                request._answer(response)
            elif request._inference is not None and request._inference.reschedule:
                self._reschedule(request)
            elif not self._host.decoupled and not request._may_be_answered():
                request._fail(self._failed(_BrokenContract("execute has left a request unanswered."), ()))

    def _checked(
        self, returned: object, requests: Sequence[InferenceRequest]
    ) -> list[InferenceResponse | None]:
        if self._host.decoupled:
            raise _BrokenContract(
                f"Python model '{self._host.instance}' is using the decoupled mode and the execute function "
                "must return None."
            )
        if not isinstance(returned, list):
            raise _BrokenContract(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(requests):
            raise _BrokenContract(
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
            request._hand_on()
            return
        request._fail(
            InferenceError(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
                "configured to handle such a flag.",
                remedy="set sequence_batching { iterative_sequence: true } in its config.pbtxt",
            )
        )

    def _failed(self, error: BaseException, requests: Sequence[InferenceRequest]) -> InferenceError:
        logger.error("model %s failed", self._host.model, exc_info=error)
        for request in requests:
            request._close()
        text = str(error) if isinstance(error, _BrokenContract) else failure_text(error)
        return InferenceError(
            f"Failed to process the request(s) for model '{self._host.instance}', message: {text}",
            status=Status.INTERNAL,
        )


def complete_config(path: Path, *, folders: Sequence[Path], host: Host, config: str) -> dict[str, Any]:
    """Return a config as the model's `auto_complete_config` completes it.

    The file is imported for this alone, and forgotten.

    Args:
        path: the model.py.
        folders: where the modules beside it are looked for.
        host: what its code may reach: it has no server.
        config: JSON.

    Raises:
        InferenceError: INTERNAL; what the file or the function raised, and where.
    """
    file = ModelPackage(path, model=host.model, folders=folders, names={CONTEXT_GLOBAL: host})
    host.package = file.package

    def complete() -> ModelConfig:
        CURRENT_CONTEXT.set(host)
        completed: Any = ModelConfig(config)
        model = _model_class(file, path)
        if hasattr(model, "auto_complete_config"):
            completed = model.auto_complete_config(completed)
        if isinstance(completed, ModelConfig):
            return completed
        raise _BrokenContract(
            f"auto_complete_config function in model '{host.model}' must return a valid pb.ModelConfig "
            "object."
        )

    try:
        return copy_context().run(complete).as_dict()
    except (Exception, SystemExit) as error:
        raise _load_error(error) from error
    finally:
        file.forget()


class _BrokenContract(Exception):
    """A model did not do what the server expects; the text is Triton's, and has no place."""

    def __init__(self, text: str, *, remedy: str = "") -> None:
        super().__init__(text)
        self.remedy = remedy


def _model_class(file: ModelPackage, path: Path) -> Any:
    if not path.is_file():
        raise _BrokenContract(f"Python model file not found in '{path}'")
    module = file.load()
    if not hasattr(module, "TritonPythonModel"):
        name = f"{path.parent.name}.{path.stem}"
        raise _BrokenContract(
            f"AttributeError: module '{name}' has no attribute 'TritonPythonModel'",
            remedy=f"define `class TritonPythonModel` in {path}",
        )
    return module.TritonPythonModel


def _load_error(error: BaseException) -> GenserveError:
    text = str(error) if isinstance(error, _BrokenContract) else failure_text(error)
    return InferenceError(text, status=Status.INTERNAL, remedy=_load_remedy(error))


def _load_remedy(error: BaseException) -> str:
    match error:
        case _BrokenContract():
            return error.remedy
        case SyntaxError(filename=str()):
            return f"mend line {error.lineno} of {error.filename}"
        case ModuleNotFoundError(name=str()):
            return f"install what has {error.name!r} into {sys.prefix}, or put it beside the model.py"
    return ""


def _check_response(request: InferenceRequest, response: object) -> None:
    if request._inference is not None and request._inference.reschedule:
        raise _BrokenContract(
            "Expected a None object in the execute function return list for reschduled request, found type "
            f"'{type(response)}'."
        )
    if not isinstance(response, InferenceResponse):
        raise _BrokenContract(
            "Expected an 'InferenceResponse' object in the execute function return list, found type "
            f"'{type(response)}'."
        )
    try:
        request._check_answerable()
    except TritonModelException as error:
        raise _BrokenContract(str(error)) from None
