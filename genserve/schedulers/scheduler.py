"""Scheduler: the queue of one version of a model, from which its instances take their batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from genserve.errors import GenserveError
from genserve.inference import Inference

__all__ = ["Scheduler"]


class Scheduler(Protocol):
    """Queues inferences; instances pull. There is no thread in between: one hand-over per batch.

    `submit` and `close` are called from any thread, `take` and `done` by the thread of each instance.
    A batch can grow until an instance is free, because it is formed when an instance asks for it.
    """

    @property
    def num_waiting(self) -> int:
        """Inferences accepted and not taken."""

    def submit(self, inference: Inference) -> None:
        """Queue an inference, whose request fits the model's config.

        Raises:
            InferenceError: the queue is full, the request breaks the rules of its sequence, or the model is
                being unloaded.
        """

    def take(self, instance: int) -> Sequence[Inference] | None:
        """Wait for the next batch for an instance, by number; None: closed.

        What is cancelled or timed out while it waits is ended, and never in a batch. What is cancelled once
        it is in one is executed: the model may ask whether it was.
        """

    def done(self, instance: int, batch: Sequence[Inference]) -> None:
        """Note that `execute` has returned: an iterative request is queued again, a sequence goes on."""

    def close(self) -> None:
        """Accept no more, and fail what waits; from now on there is nothing to `take`."""

    def abandon(self, instance: int, error: GenserveError) -> None:
        """Note that an instance has died: what only it could have executed fails.

        After the last one everything fails that waits, and nothing more is accepted.
        """
