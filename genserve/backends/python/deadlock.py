"""Deadlock: whether an inference can still progress, from who executes and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from genserve.inference import Executor, Inference

__all__ = ["deadlocked", "waits_for_itself"]


def deadlocked(inference: Inference) -> bool:
    """Whether an inference is stuck, and it or a part of it has no executor yet.

    It is stuck, as it waits for itself by way of others, iff every executor that could run it waits for
    something stuck, or a part of it is stuck. An executor that is free, or that executes without waiting, is
    never stuck, however slow it is; one that needs a resource is stuck iff all that keep it from that are.
    Of a ring of waiting inferences the deadlocked ones are those to fail: the others then end by themselves.
    """
    found = _stuck_from(inference)
    return any(part in found and not part.started_ns for part in _with_parts(inference))


def waits_for_itself(inference: Inference) -> bool:
    """Whether the backlog of an inference, which its model waits for, waits in its turn for that model.

    So it is where a later step of an ensemble calls the model of an earlier one.
    """
    if inference.backlog is None:
        return False
    held = frozenset(inference.executors)
    return any(part in _stuck_from(part, held=held) for part in inference.backlog.waiting)


def _stuck_from(
    inference: Inference, *, held: frozenset[Executor] = frozenset()
) -> set[Inference | Executor]:
    """Return all that is stuck of what `inference` depends on: the greatest set that nothing can leave.

    Args:
        inference: where to begin.
        held: executors that are held whatever they execute.
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
    if any(part in found for part in tuple(node.parts)) or _all_held(node.blocked_by(), found):
        return True
    return _all_held(node.executors, found)


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
            todo += [*tuple(node.parts), *node.blocked_by(), *node.executors]
    return seen


def _with_parts(inference: Inference) -> Iterator[Inference]:
    if not inference.parts:
        yield inference
    for part in tuple(inference.parts):
        yield from _with_parts(part)
