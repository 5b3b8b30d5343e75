"""Tracing: records timestamps and tensors of single requests, in the JSON of Triton's traces."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import orjson

from genserve.tensor import DataType, Tensor

logger = logging.getLogger(__name__)

# The most traces that may wait for the disk; further traces are lost.
_MAX_UNWRITTEN = 10_000         # traces
_MAX_UNWRITTEN_BYTES = 2**28    # bytes of their tensors
_IDS = itertools.count(1)
_OPEN: WeakValueDictionary[int, Span] = WeakValueDictionary()


class Trace:
    """One traced request of a client, with the requests that its model sends to other models.

    It ends when the protocol has called `close` and every model has ended its request. Its methods are safe
    from any thread. Times come from `time.monotonic_ns()`, as Triton uses the steady clock.

    Attributes:
        root: the span of the model that the client called.
    """

    __slots__ = ("_lock", "_num_open", "_on_end", "_spans", "has_tensors", "has_timestamps", "root")

    def __init__(self, *, has_timestamps: bool, has_tensors: bool, on_end: Callable[[Trace], None]) -> None:
        """Begin a trace with the levels TIMESTAMPS and TENSORS; `on_end` is called once, when it ends."""
        self.has_timestamps = has_timestamps
        self.has_tensors = has_tensors
        self._on_end = on_end
        self._lock = threading.Lock()
        self._num_open = 1  # the protocol's part
        self._spans: list[Span] = []
        self.root = Span(self)

    def record(self, name: str) -> None:
        """Record a timestamp of the protocol."""
        self.root.record(name)

    def close(self) -> None:
        """End the part of the protocol or of a model."""
        with self._lock:
            self._num_open -= 1
            is_over = not self._num_open
        if is_over:
            self._on_end(self)

    @property
    def is_empty(self) -> bool:
        """Whether no model has accepted a request."""
        return not self._spans

    def to_json(self) -> bytes:
        """Return the events of the trace as JSON, without the brackets of the list."""
        events = [event for span in self._spans for event in span.events()]
        try:
            return orjson.dumps(events)[1:-1]
        except TypeError:   # a lone surrogate in a text, which UTF-8 cannot encode
            return json.dumps(events, ensure_ascii=False).encode(errors="replace")[1:-1]

    @property
    def num_bytes(self) -> int:
        """The size of the recorded tensors, in bytes."""
        return sum(span.num_bytes for span in self._spans)

    def _add(self, span: Span) -> bool:
        """Add the span of a model; False: the trace has ended."""
        with self._lock:
            if not self._num_open:
                return False
            self._num_open += 1
            self._spans.append(span)
            return True


class Span:
    """The part of one model in a traced request.

    Pickling keeps the id only: in the stub process of a model a span records nothing, and the server finds
        the
    span again by its id.

    Attributes:
        id: the id in the file, unique in one run of a server.
        computes: False for an ensemble, whose steps compute.
        trace: the trace that the span belongs to; None in a stub process.
    """

    __slots__ = ("__weakref__", "_has_token", "_head", "_notes", "_parent", "computes", "id", "trace")

    def __init__(self, trace: Trace | None, *, id: int = 0, parent: Span | None = None) -> None:  # noqa: A002
        self.id = id or next(_IDS)
        self.computes = True
        self._has_token = False
        self.trace = trace
        self._parent = parent
        self._head: dict[str, Any] = {}
        self._notes: list[tuple[str, int | Tensor]] = []

    def open(
        self, *, model: str, version: int, request_id: str, inputs: Iterable[Tensor], at_ns: int
    ) -> Span | None:
        """Begin the span of a model that the client calls, or that the model of this span calls.

        Returns:
            The span, to be closed; None: the trace has ended.
        """
        if self.trace is None:
            return None
        span = Span(self.trace, parent=self) if self._head else self
        head = {"id": span.id, "model_name": model, "model_version": version}
        if request_id:
            head["request_id"] = request_id
        if span._parent is not None:
            head["parent_id"] = span._parent.id
        span._head = head
        if not self.trace._add(span):
            return None
        _OPEN[span.id] = span
        span.record("REQUEST_START", at_ns)
        span.record("QUEUE_START", at_ns)
        span._note_tensors("TENSOR_QUEUE_INPUT", inputs)
        return span

    def record(self, name: str, at_ns: int = 0) -> None:
        """Record a timestamp; 0: now."""
        if self.trace is not None and self.trace.has_timestamps:
            self._notes.append((name, at_ns or time.monotonic_ns()))

    def record_first_token(self) -> None:
        """Record the first token of a text, an activity that Triton lacks; later calls do nothing."""
        if not self._has_token:
            self._has_token = True
            self.record("FIRST_TOKEN")

    def answered(self, outputs: Iterable[Tensor]) -> None:
        """Record a response."""
        if self._parent is None:
            self.record("INFER_RESPONSE_COMPLETE")
        self._note_tensors("TENSOR_BACKEND_OUTPUT", outputs)

    def close(self, *, started_ns: int) -> None:
        """Record the end of the span. `started_ns` is when the model began to compute; 0: never.

        As in the statistics, inputs and outputs take no time.
        """
        assert self.trace is not None  # `open` requires a trace
        now_ns = time.monotonic_ns()
        if started_ns and self.computes:
            self.record("COMPUTE_START", started_ns)
            self.record("COMPUTE_INPUT_END", started_ns)
            self.record("COMPUTE_OUTPUT_START", now_ns)
            self.record("COMPUTE_END", now_ns)
        self.record("REQUEST_END", now_ns)
        self.trace.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the records for the file."""
        yield self._head
        for name, value in self._notes:
            if isinstance(value, int):
                yield {"id": self.id, "timestamps": [{"name": name, "ns": value}]}
            else:
                yield {"id": self.id, "activity": name, "tensor": _tensor_json(value)}

    @property
    def num_bytes(self) -> int:
        """The size of the recorded tensors, in bytes."""
        return sum(_num_bytes(value) for _, value in self._notes if isinstance(value, Tensor))

    def _note_tensors(self, activity: str, tensors: Iterable[Tensor]) -> None:
        if self.trace is None or not self.trace.has_tensors:
            return
        for tensor in tensors:  # copy the array, since the model may reuse its own
            copy = Tensor(tensor.name, np.array(tensor.array), data_type=tensor.data_type)
            self._notes.append((activity, copy))

    def __reduce__(self) -> tuple[Callable[[int], Span], tuple[int]]:
        return _span_of, (self.id,)


def _span_of(id: int) -> Span:  # noqa: A002
    return _OPEN.get(id) or Span(None, id=id)


def _num_bytes(tensor: Tensor) -> int:
    if tensor.data_type is DataType.BYTES:
        return sum(len(element) for element in tensor.array.flat if isinstance(element, str | bytes))
    return int(tensor.array.nbytes)


def _tensor_json(tensor: Tensor) -> dict[str, str]:
    return {
        "name": tensor.name,
        "data": ",".join(_elements(tensor)),
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.data_type.name,
    }


def _elements(tensor: Tensor) -> Iterator[str]:
    array = tensor.array.reshape(-1)
    match tensor.data_type:
        case DataType.BYTES:
            for element in array:
                text = element if isinstance(element, str) else bytes(element).decode(errors="replace")
                yield '"' + text.replace('"', '""') + '"'  # CSV, as Triton's tool reads it
        case DataType.BF16:
            yield from map(str, (array.astype(np.uint32) << 16).view(np.float32))
        case DataType.BOOL:
            yield from map(str, array.astype(np.uint8))
        case _:
            yield from map(str, array)


class TraceFile:
    """Writes the trace files of a server on a thread; a file is valid JSON after each trace.

    Attributes:
        path: the file of the traces; numbered files are PATH.0, PATH.1, ...
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_numbered = 0
        self._begun: set[Path] = set()
        self._waiting: SimpleQueue[tuple[Trace, Path, int] | None] = SimpleQueue()
        self._num_waiting_bytes = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._has_failed = False

    def numbered(self) -> Path:
        """Return the path of the next numbered file."""
        with self._lock:
            number = self._num_numbered
            self._num_numbered += 1
        return self.path.with_name(f"{self.path.name}.{number}")

    def put(self, trace: Trace, path: Path) -> None:
        """Queue a trace for a file; from any thread, without waiting. After `close` the trace is lost."""
        num_bytes = trace.num_bytes
        with self._lock:
            if self._is_closed:
                return
            is_full = (
                self._waiting.qsize() >= _MAX_UNWRITTEN
                or self._num_waiting_bytes + num_bytes > _MAX_UNWRITTEN_BYTES
            )
            if not is_full:
                self._num_waiting_bytes += num_bytes
                self._waiting.put((trace, path, num_bytes))
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="traces", daemon=True)
                self._thread.start()
        if is_full:
            self._fail("traces are lost: more wait than can be written")

    def close(self) -> None:
        """Write the queued traces; blocks."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
            self._waiting.put(None)
        if thread is not None:
            thread.join()

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            trace, path, num_bytes = item
            try:
                self._write(trace.to_json(), path)
            except OSError as error:
                self._fail(f"a trace could not be written to {path}: {error.strerror}")
            except Exception:   # go on, since the next traces must still be written
                logger.exception("a trace could not be written to %s", path)
            with self._lock:
                self._num_waiting_bytes -= num_bytes

    def _write(self, text: bytes, path: Path) -> None:
        # Begin a file again that was removed or emptied.
        is_new = path not in self._begun or not path.exists() or not path.stat().st_size
        with path.open("wb" if is_new else "r+b") as file:
            if not is_new:
                file.seek(-1, os.SEEK_END)  # overwrite the closing bracket
            file.write((b"[" if is_new else b",") + text + b"]")
        self._begun.add(path)

    def _fail(self, text: str) -> None:
        if not self._has_failed:
            logger.error("%s; further failures are not logged", text)
        self._has_failed = True
