"""Deadlock: whether an inference can still progress, from who executes and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator

from genserve.inference import Executor, Inference

__all__ = ["hopeless"]


def hopeless(inference: Inference) -> bool:
    """Whether an inference is stuck, and it or a part of it has no executor yet.

    It is stuck, as it waits for itself by way of others, iff every executor that could run it waits for
    something stuck, or a part of it is stuck. An executor that is free, or that executes without waiting, is
    never stuck, however slow it is; one that needs a resource is stuck iff all that keep it from that are.
    Of a ring of waiting inferences the hopeless ones are those to fail: the others then end by themselves.
    """
    found = _stuck_from(inference)
    return any(part in found and not part.started_ns for part in _with_parts(inference))


def _stuck_from(inference: Inference) -> set[Inference | Executor]:
    """Return all that is stuck of what `inference` depends on: the greatest set that nothing can leave."""
    found = _reachable(inference)
    while free := [node for node in found if not _is_held(node, found)]:
        found.difference_update(free)
    return found


def _is_held(node: Inference | Executor, found: set[Inference | Executor]) -> bool:
    if isinstance(node, Executor):
        if node.executing:
            return any(other in found for other in tuple(node.waiting_for))
        blockers = node.blocked_by()
        return bool(blockers) and all(other in found for other in blockers)
    if node.ended:
        return False
    if any(part in found for part in tuple(node.parts)):
        return True
    return bool(node.executors) and all(executor in found for executor in node.executors)


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
            todo += [*tuple(node.parts), *node.executors]
    return seen


def _with_parts(inference: Inference) -> Iterator[Inference]:
    if not inference.parts:
        yield inference
    for part in tuple(inference.parts):
        yield from _with_parts(part)
