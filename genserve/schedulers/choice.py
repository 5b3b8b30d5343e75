"""Choice: the scheduler that a model's config asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from genserve.config.model_config import ModelConfig
from genserve.schedulers.batch_rules import alike
from genserve.schedulers.direct import DirectQueue
from genserve.schedulers.dynamic_batcher import DynamicQueue
from genserve.schedulers.queue import Queue
from genserve.schedulers.queue_scheduler import Permit, QueueScheduler
from genserve.schedulers.scheduler import Scheduler
from genserve.schedulers.sequence_batcher import SequenceQueue

__all__ = ["make_scheduler"]


def make_scheduler(
    config: ModelConfig, *, num_instances: int, path: Path, permits: Sequence[Permit] = ()
) -> Scheduler:
    """Make the scheduler of one version of a model.

    Args:
        config: of the model, normalised.
        num_instances: how many instances will take from it, numbered from 0.
        path: the folder of the model, for the files of initial states.
        permits: what each instance must hold while it executes, from the rate limiter; empty: nothing.

    Raises:
        RepositoryError: a file of an initial state cannot be read, or is too short.
    """
    queue = _queue(config, num_instances=num_instances, path=path)
    return QueueScheduler(queue, num_instances=num_instances, permits=permits)


def _queue(config: ModelConfig, *, num_instances: int, path: Path) -> Queue:
    if config.sequence_batching is not None:
        return SequenceQueue(config, num_instances=num_instances, path=path)
    if config.dynamic_batching is not None:
        return DynamicQueue(
            config.dynamic_batching, max_batch_size=config.max_batch_size, alike=alike(config)
        )
    return DirectQueue()
