"""Deadlock: finds BLS requests that can never be answered, and fails them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from genserve.errors import InferenceError, Status
from genserve.inference import Executor, Inference

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.25  # between two checks of a wait, which must agree


class Wait:
    """A wait of an instance for an inference, visible to the checks of other waits.

    Attributes:
        inference: the inference that the instance waits for.
    """

    def __init__(self, inference: Inference, executor: Executor | None) -> None:
        """Begin to wait.

        Args:
            inference: the inference to wait for.
            executor: the waiting instance; None: no instance is blocked.
        """
        self.inference = inference
        self._executor = executor
        self._batch = executor.executing if executor is not None else ()
        self._suspected = False
        if executor is not None:
            executor.waiting_for.add(inference)

    def check(self) -> None:
        """Raise InferenceError if the inference was deadlocked in this check and in the one before.

        One check is not enough, since requests progress during it.
        """
        if self._executor is not None and self._executor.executing is not self._batch:
            self.end()  # a task outlived its batch: the instance does not wait for it
        suspected, self._suspected = self._suspected, deadlocked(self.inference)
        if suspected and self._suspected:
            raise _deadlock_error(self.inference)

    def end(self) -> None:
        """End the wait."""
        if self._executor is not None:
            self._executor.waiting_for.discard(self.inference)


def bls_error(name: str, text: str, *, status: Status) -> InferenceError:
    """Return the error of a BLS request to the model `name`, in Triton's form."""
    return InferenceError(f"Model {name} - Error when running inference: {text}", status=status)


def _deadlock_error(inference: Inference) -> InferenceError:
    name = inference.request.model_name
    return bls_error(
        name,
        "deadlock: every instance that could run the request waits, directly or through other models, for "
        f"this request. Raise the count in the instance_group of model '{name}', raise the resources of its "
        "rate_limiter, or remove the cycle of calls.",
        status=Status.UNAVAILABLE,
    )


def deadlocked(inference: Inference) -> bool:
    """Whether an inference is stuck, and it or a part of it has no executor yet.

    An inference is stuck iff a part of it is, or every executor that could run it is. An executor is stuck
    iff it waits for a stuck inference, or all executors that hold a resource that it needs are stuck; one
    that is free, or that executes without waiting, never is, however slow. When the deadlocked inferences of
    a cycle fail, the others of the cycle end by themselves.
    """
    found = _stuck_from(inference)
    return any(part in found and not part.started_ns for part in _with_parts(inference))


def waits_for_itself(inference: Inference) -> bool:
    """Whether the backlog of an inference, for which its model waits, itself waits for that model.

    This is the case if a later step of an ensemble calls the model of an earlier step.
    """
    if inference.backlog is None:
        return False
    held = frozenset(inference.blocked_by())    # the executor that executes it
    return any(part in _stuck_from(part, held=held) for part in inference.backlog.waiting)


def lift_backlog_if_circular(inference: Inference) -> None:
    """Stop throttling the model that responds if the backlog of its responses waits for that model."""
    if inference.backlog is not None and waits_for_itself(inference):
        logger.warning(
            "model %s ignores max_inflight_requests, since a later step of the request waits for it",
            inference.request.model_name,
        )
        inference.backlog.lift()


def _stuck_from(
    inference: Inference, *, held: frozenset[Inference | Executor] = frozenset()
) -> set[Inference | Executor]:
    """Return the stuck nodes that `inference` depends on: the largest set without a free node.

    Args:
        inference: where to begin.
        held: executors that count as busy whatever they execute.
    """
    found = _reachable(inference)
    while free := [node for node in found if node not in held and not _is_held(node, found)]:
        found.difference_update(free)
    return found


def _is_held(node: Inference | Executor, found: set[Inference | Executor]) -> bool:
    if isinstance(node, Executor):
        if node.executing:
            return any(other in found for other in tuple(node.waiting_for))
        return _all_held(node.blocked_by(), found)
    if node.ended:
        return False
    return any(part in found for part in tuple(node.parts)) or _all_held(node.blocked_by(), found)


def _all_held(nodes: Sequence[Inference | Executor], found: set[Inference | Executor]) -> bool:
    return bool(nodes) and all(node in found for node in nodes)


def _reachable(inference: Inference) -> set[Inference | Executor]:
    seen: set[Inference | Executor] = set()
    todo: list[Inference | Executor] = [inference]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Executor):
            todo += [*tuple(node.waiting_for), *node.blocked_by()]
        else:
            todo += [*tuple(node.parts), *node.blocked_by()]
    return seen


def _with_parts(inference: Inference) -> Iterator[Inference]:
    if not inference.parts:
        yield inference
    for part in tuple(inference.parts):
        yield from _with_parts(part)
