"""Engine threads over fake models, and their callers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from genserve.engine.admission_control import QueueLimits
from genserve.engine.engine import Engine
from genserve.engine.engine_thread import EngineThread
from genserve.errors import GenserveError
from genserve.generation_metrics import Metrics
from tests.fakes.logits import PagedLogits, logits_after
from tests.fakes.sequences import logits_request, made_sequences, sample_loop

EIGHT_WAITING = QueueLimits(max_requests=8)


class GatedLogits(PagedLogits):
    """Blocks every step but the first of a sequence until its gate is opened."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate = threading.Semaphore(0)
        self.open = False

    def forward(self, batch):
        if not self.open and batch.num_computed_tokens.any():
            self.gate.acquire()
        return super().forward(batch)

    def open_gate(self):
        self.open = True
        self.gate.release()


class RecordingSink:
    """Stores the outputs."""

    def __init__(self):
        self.outputs = []

    def deliver(self, outputs):
        self.outputs += outputs


def engine_thread(
    model: PagedLogits,
    *,
    limits: QueueLimits = EIGHT_WAITING,
    clock: Callable[[], float] = time.monotonic,
    metrics: Metrics | None = None,
) -> EngineThread:
    return EngineThread(
        Engine(model, decode=sample_loop, clock=clock),
        name="test",
        max_num_seqs=model.max_num_seqs,
        limits=limits,
        metrics=(metrics or Metrics()).for_model("test"),
        sequences_of=made_sequences,
    )


class LogitsLoop:
    """A plain loop over logits, like that of a model.py: it sends all ids every time."""

    def __init__(self, engine: EngineThread, prompt: list[int]) -> None:
        self.token_ids = list(prompt)
        self._engine = engine
        self._answers: SimpleQueue = SimpleQueue()

    def ask(self) -> None:
        request = logits_request(self.token_ids, on_logits=self._answers.put)
        self._engine.submit_logits([request])

    def receive(self) -> None:
        logits = self._answers.get()
        np.testing.assert_array_equal(logits, logits_after(self.token_ids))
        self.token_ids.append(int(logits.argmax()))


def wait_for_end(sink: RecordingSink) -> GenserveError | None:
    """Wait for the first outputs, and return the error if they end with one."""
    while not sink.outputs:
        time.sleep(0)
    content = sink.outputs[-1].content
    return content if isinstance(content, GenserveError) else None
