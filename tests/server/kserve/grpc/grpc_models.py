"""Models for the tests of gRPC."""

from __future__ import annotations

import json
import queue
import threading

import numpy as np

from genserve.errors import InferenceError, Status
from genserve.inference import Inference, InferenceResponse
from genserve.tensor import Tensor
from tests.fakes.inference_server import FakeModel, fake_model, identity


def describe(inference: Inference) -> None:
    """Answer with the request as the model receives it, as JSON."""
    request = inference.request
    seen = {
        "id": request.id,
        "correlation_id": request.correlation_id,
        "flags": int(request.flags),
        "priority": request.priority,
        "timeout_us": request.timeout_us,
        "parameters": dict(request.parameters),
        "outputs": list(request.requested_outputs),
    }
    text = np.array([json.dumps(seen).encode()], dtype=object)
    inference.send(InferenceResponse(outputs=(Tensor("Y", text),), parameters={"n": 1, "x": 0.5}), final=True)


def repeat(inference: Inference) -> None:
    """Answer X times; the end comes alone, unless X is negative. From 100 on, fail after one."""
    count = int(inference.inputs["X"].array[0])
    fails, ends_with_last = count >= 100, count < 0
    count = 1 if fails else abs(count)
    for number in range(count):
        output = Tensor("Y", np.array([number], np.int32))
        final = ends_with_last and number == count - 1
        inference.send(InferenceResponse(outputs=(output,)), final=final)
    if fails:
        inference.fail(InferenceError("bad luck", status=Status.NOT_FOUND))
    elif not ends_with_last:
        inference.send(None, final=True)


def fail_with_status(inference: Inference) -> None:
    """Fail with the status whose name X is."""
    [name] = inference.inputs["X"].array.tolist()
    raise InferenceError(f"failed with {name.decode()}", status=Status(name.decode()), remedy="be ß better")


def silent(inference: Inference) -> None:
    """End without a response."""
    inference.send(None, final=True)


def unwritable(inference: Inference) -> None:
    """Answer with a number that no message can hold."""
    inference.send(InferenceResponse(parameters={"n": 2**70}), final=True)


def fail_at_length(inference: Inference) -> None:
    """Fail with a message of X characters."""
    raise InferenceError("ß%\n" * int(inference.inputs["X"].array[0]), remedy="x" * 20000)


class Blocking:
    """A model that waits until it is released or its request is cancelled, and records how each ended."""

    def __init__(self, name: str = "blocking", *, decoupled: bool = False) -> None:
        self.go = threading.Event()
        self.started: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.model: FakeModel = fake_model(name, self._execute, decoupled=decoupled)

    def _execute(self, inference: Inference) -> None:
        changed = threading.Event()
        inference.when_cancelled(changed.set)
        self.started.put(inference.request.id)
        while not (changed.wait(0.001) or self.go.is_set()):
            pass
        if inference.cancelled:
            inference.fail_cancelled()
            self.ended.put("cancelled")
        else:
            identity(inference)
            self.ended.put("answered")


def all_models() -> list[FakeModel]:
    counts = fake_model("repeat", repeat, data_type="TYPE_INT32", dims=(1,), decoupled=True)
    return [
        fake_model("batched", max_batch_size=8, labels=("cat", "dog", "bird")),
        fake_model("describe", describe, data_type="TYPE_STRING"),
        fake_model("fail", fail_with_status, data_type="TYPE_STRING"),
        fake_model("silent", silent),
        fake_model("unwritable", unwritable),
        fake_model("fail_at_length", fail_at_length, data_type="TYPE_INT32", dims=(1,)),
        fake_model("unwritable_stream", unwritable, decoupled=True),
        counts,
        *(fake_model(f"id_{word}", data_type=f"TYPE_{word}") for word in DATA_TYPES),
    ]


DATA_TYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "STRING", "BF16",
)  # fmt: skip
__all__ = ["DATA_TYPES", "Blocking", "all_models"]
