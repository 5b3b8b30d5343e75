"""Inferences for the tests of schedulers, which remember how they ended."""

from __future__ import annotations

import numpy as np

from genserve.inference import Inference, InferenceRequest, InferenceResponse, RequestFlags
from genserve.tensor import Tensor

MS = 1_000_000
START, END = RequestFlags.SEQUENCE_START, RequestFlags.SEQUENCE_END


class Asked:
    """An inference, and what came of it."""

    def __init__(
        self, *, rows=1, shape=(4,), request_id="", inputs=("X",), flags=RequestFlags.NONE, **request
    ):
        self.responses: list[tuple[InferenceResponse | None, bool]] = []
        tensors = {name: Tensor(name, np.zeros((rows, *shape), np.float32)) for name in inputs}
        self.inference = Inference(
            request=InferenceRequest(model_name="m", id=request_id, inputs=tensors, flags=flags, **request),
            on_response=lambda response, final: self.responses.append((response, final)),
            batch_size=rows,
            model_name="m",
        )

    @property
    def error(self):
        """The message it failed with."""
        return self.inference.error.message if self.inference.error else None


def asked(num, **kwargs) -> list[Asked]:
    """Ask the same some times."""
    return [Asked(**kwargs) for _ in range(num)]


def inferences(some) -> tuple[Inference, ...]:
    """Return the inferences of what was asked."""
    return tuple(one.inference for one in some)


class Desk:
    """Drives a queue by hand, with a clock that stands still unless it is moved."""

    def __init__(self, queue):
        self.queue = queue
        self.now_ns = 1000 * MS
        self.asked: list[Asked] = []

    def add(self, *some: Asked) -> None:
        """Queue them at the present time."""
        for one in some:
            self.queue.add(one.inference, now_ns=self.now_ns)
            self.asked.append(one)

    def plan(self, instance=0):
        """What may run now."""
        return self.queue.plan(instance, now_ns=self.now_ns)

    def take(self, instance=0) -> list[Asked]:
        """Take what may run now."""
        planned = self.plan(instance).batch
        batch = self.queue.start(instance, planned, now_ns=self.now_ns) if planned else ()
        return [self.asked_of(inference) for inference in batch]

    def asked_of(self, inference) -> Asked | None:
        """Find it; None: the scheduler made it up."""
        return next((one for one in self.asked if one.inference is inference), None)

    def run(self, instance=0) -> list[Asked]:
        """Take what may run now, answer it, and be done."""
        batch = self.take(instance)
        self.finish(batch, instance)
        return batch

    def finish(self, batch, instance=0) -> None:
        """Answer and be done."""
        for one in batch:
            if one is not None and not one.inference.reschedule:
                one.inference.send(InferenceResponse(), final=True)
        executed = inferences(one for one in batch if one is not None)
        self.tell(self.queue.done(instance, executed, now_ns=self.now_ns))

    def pass_time(self, ms: float) -> list[Asked]:
        """Move the clock; return what expires."""
        self.now_ns += int(ms * MS)
        expires_ns = self.queue.expires_ns
        if expires_ns is None or expires_ns > self.now_ns:
            return []
        return self.tell(self.queue.expire(now_ns=self.now_ns))

    def cancel(self, one: Asked) -> list[Asked]:
        """Cancel one; return what leaves with it."""
        one.inference.cancel()
        return self.tell(self.queue.cancel(one.inference, now_ns=self.now_ns))

    def tell(self, rejected) -> list[Asked]:
        """End what was rejected."""
        for rejection in rejected:
            rejection.send()
        return [self.asked_of(rejection.inference) for rejection in rejected]
