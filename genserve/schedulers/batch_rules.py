"""Batch rules: which of the waiting requests make a batch now, by Triton's rule, as a function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from genserve.config.model_config import ModelConfig
from genserve.inference import Inference
from genserve.schedulers.queue import NOTHING_TO_DO, Plan

__all__ = ["BatchRules", "Entry", "alike", "plan_batch"]

# Requests of one batch have the same.
Alike = Callable[[Inference], Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """When a batch is complete."""

    max_rows: int                                       # 1 where the model does not batch
    preferred_rows: frozenset[int] = frozenset()        # sizes that run at once; empty: any
    max_delay_ns: int = 0                               # how long the oldest waits for a better batch

    @classmethod
    def of(
        cls, *, max_batch_size: int, preferred_batch_sizes: Iterable[int], max_queue_delay_us: int
    ) -> BatchRules:
        """Read them from a config; without preferred sizes the largest is preferred."""
        max_rows = max(1, max_batch_size)
        return cls(
            max_rows=max_rows,
            preferred_rows=frozenset(preferred_batch_sizes) or frozenset({max_rows}),
            max_delay_ns=max_queue_delay_us * 1000,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One request that waits."""

    inference: Inference
    added_ns: int
    alike: Hashable = None
    expires_ns: int | None = None


def alike(config: ModelConfig) -> Alike:
    """Return what requests must have in common to share a batch.

    The shapes of the inputs that may vary and are not ragged; if some are optional, which there are; and the
    shapes of the states that their sequences have come to.
    """
    of_inputs = _alike_inputs(config)
    if config.sequence_batching is None or not config.sequence_batching.states:
        return of_inputs
    return lambda sent: (of_inputs(sent), tuple(state.shape for state in (sent.states or {}).values()))


def _alike_inputs(config: ModelConfig) -> Alike:
    enforced = [spec.name for spec in config.inputs if -1 in spec.dims and not spec.allow_ragged_batch]
    first = 1 if config.max_batch_size else 0  # the batch dimension may differ
    if any(spec.optional for spec in config.inputs):
        return lambda sent: (frozenset(sent.request.inputs), _shapes(sent, enforced, first=first))
    if enforced:
        return lambda sent: _shapes(sent, enforced, first=first)
    return lambda sent: None


def plan_batch(entries: Iterable[Entry], rules: BatchRules, *, now_ns: int) -> Plan:
    """Walk the queue from its head until a request does not fit; nobody is passed over.

    A preferred size that was reached runs at once, the largest of them; so does what cannot grow. Anything
    else waits until the delay of its oldest request is over, and then all of it runs.
    """
    batch: list[Entry] = []
    rows = num_preferred = 0
    largest = max(rules.preferred_rows, default=0)
    is_full = False
    for entry in entries:
        if batch:
            rows_then = rows + entry.inference.batch_size
            if rows_then > largest and not num_preferred:
                num_preferred = len(batch)
            if rows_then > rules.max_rows or entry.alike != batch[0].alike:
                is_full = True
                break
        batch.append(entry)
        rows += entry.inference.batch_size
        if rows in rules.preferred_rows:
            num_preferred = len(batch)
    if not batch:
        return NOTHING_TO_DO
    due_ns = min(entry.added_ns for entry in batch) + rules.max_delay_ns
    is_late = rules.max_delay_ns > 0 and now_ns >= due_ns
    if num_preferred and not is_late:
        return Plan(_inferences(batch[:num_preferred]))
    if is_full or is_late or rows >= largest or not rules.max_delay_ns:
        return Plan(_inferences(batch))
    return Plan(until_ns=due_ns)


def _inferences(entries: Sequence[Entry]) -> tuple[Inference, ...]:
    return tuple(entry.inference for entry in entries)


def _shapes(inference: Inference, names: Sequence[str], *, first: int) -> tuple[tuple[int, ...] | None, ...]:
    inputs = inference.request.inputs  # as sent: controls come and go
    return tuple(inputs[name].shape[first:] if name in inputs else None for name in names)
