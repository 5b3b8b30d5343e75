"""Queue driver: runs a queue step by step, with requests that record their responses."""

from __future__ import annotations

import numpy as np

from genserve.inference import Inference, InferenceRequest, InferenceResponse, RequestFlags
from genserve.tensor import Tensor

MS = 1_000_000
START, END = RequestFlags.SEQUENCE_START, RequestFlags.SEQUENCE_END


class SentRequest:
    """An inference and its responses."""

    def __init__(
        self, *, rows=1, shape=(4,), request_id="", inputs=("X",), flags=RequestFlags.NONE, **request
    ):
        self.responses: list[tuple[InferenceResponse | None, bool]] = []
        tensors = {name: Tensor(name, np.zeros((rows, *shape), np.float32)) for name in inputs}
        self.inference = Inference(
            request=InferenceRequest(model_name="m", id=request_id, inputs=tensors, flags=flags, **request),
            on_response=lambda response, final: self.responses.append((response, final)),
            batch_size=rows,
        )

    @property
    def error(self):
        """The message of its error."""
        return self.inference.error.message if self.inference.error else None


def asked(num, **kwargs) -> list[SentRequest]:
    """Return `num` equal requests."""
    return [SentRequest(**kwargs) for _ in range(num)]


def inferences(some) -> tuple[Inference, ...]:
    """Return the inferences of requests."""
    return tuple(one.inference for one in some)


class QueueDriver:
    """Drives a queue step by step, with a clock that only `pass_time` moves."""

    def __init__(self, queue):
        self.queue = queue
        self.now_ns = 1000 * MS
        self.asked: list[SentRequest] = []

    def add(self, *some: SentRequest) -> None:
        """Queue requests now."""
        for one in some:
            self.queue.add(one.inference, now_ns=self.now_ns)
            self.asked.append(one)

    def plan(self, instance=0):
        """Return the plan of an instance."""
        return self.queue.plan(instance, now_ns=self.now_ns)

    def take(self, instance=0) -> list[SentRequest]:
        """Take the batch that may run now."""
        planned = self.plan(instance).batch
        batch = self.queue.start(instance, planned, now_ns=self.now_ns) if planned else ()
        return [self.asked_of(inference) for inference in batch]

    def asked_of(self, inference) -> SentRequest | None:
        """Return the request of an inference; None: it is a null request."""
        return next((one for one in self.asked if one.inference is inference), None)

    def run(self, instance=0) -> list[SentRequest]:
        """Take the batch that may run now, respond and finish it."""
        batch = self.take(instance)
        self.finish(batch, instance)
        return batch

    def finish(self, batch, instance=0) -> None:
        """Respond to a batch and finish it."""
        for one in batch:
            if one is not None and not one.inference.reschedule:
                one.inference.send(InferenceResponse(), final=True)
        executed = inferences(one for one in batch if one is not None)
        self.send(self.queue.done(instance, executed, now_ns=self.now_ns))

    def pass_time(self, ms: float) -> list[SentRequest]:
        """Move the clock; return the requests that expire."""
        self.now_ns += int(ms * MS)
        expires_ns = self.queue.expires_ns
        if expires_ns is None or expires_ns > self.now_ns:
            return []
        return self.send(self.queue.expire(now_ns=self.now_ns))

    def cancel(self, one: SentRequest) -> list[SentRequest]:
        """Cancel a request; return the requests that leave the queue."""
        one.inference.cancel()
        return self.send(self.queue.cancel(one.inference, now_ns=self.now_ns))

    def send(self, rejected) -> list[SentRequest]:
        """Send rejections; return their requests."""
        for rejection in rejected:
            rejection.send()
        return [self.asked_of(rejection.inference) for rejection in rejected]
