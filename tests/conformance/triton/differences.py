"""Differences: where genserve answers otherwise than the real server, on purpose.

An entry holds for the exchanges whose `topic/name` matches its pattern, and tells the expected answer
(or counts) of genserve from what was recorded. docs/ has the same table for users.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from genserve.version import __version__
from tests.conformance.triton.exchange import Exchange

__all__ = ["DIFFERENCES", "Difference", "of_genserve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One deliberate difference."""

    exchanges: str  # a regular expression that the whole of `topic/name` matches
    reason: str
    answer: Callable[[dict[str, Any]], dict[str, Any]] = copy.copy  # from the real server's answer
    counts: Callable[[dict[str, Any]], dict[str, Any]] = copy.copy  # the same of the counts


def of_genserve(topic: str, exchange: Exchange) -> Exchange:
    """The exchange with what genserve is expected to answer."""
    for difference in DIFFERENCES:
        if re.fullmatch(difference.exchanges, f"{topic}/{exchange.name}"):
            steps = tuple(
                replace(step, expect=difference.answer(step.expect or {})) for step in exchange.steps
            )
            exchange = replace(exchange, steps=steps, counts=difference.counts(exchange.counts or {}))
    return exchange


def _own_name(answer: dict[str, Any]) -> dict[str, Any]:
    kind = "json" if "json" in answer else "message"
    if "extensions" not in answer.get(kind, {}):
        return answer
    return answer | {kind: answer[kind] | {"name": "genserve", "version": __version__}}


def _json_error(answer: dict[str, Any]) -> dict[str, Any]:
    if answer.get("headers", {}).get("content-type") != "text/plain" or "error" not in answer.get("json", {}):
        return answer
    return answer | {"headers": answer["headers"] | {"content-type": "application/json"}}


DIFFERENCES = (
    Difference(
        exchanges=r".*/.*server_metadata.*",
        reason="genserve says its own name and version",
        answer=_own_name,
    ),
    Difference(
        exchanges=r".*",
        reason="the body of an error is JSON, so that is its content type, also where the model made it",
        answer=_json_error,
    ),
)
