"""Replay: sends the recorded exchanges to a server again and compares the answers.

    python -m tests.conformance.triton.replay --run all

replays them to a real Triton (see record.py for how to start one), which answers all of them equally.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from typing import Any

from tests.conformance.triton.conversation import Addresses, Conversation, first_equal, last_of_settled
from tests.conformance.triton.counts import counts_of, difference
from tests.conformance.triton.exchange import Exchange, canonical, load_topics
from tests.conformance.triton.runs import RUNS

__all__ = ["mismatches"]


def mismatches(exchange: Exchange, conversation: Conversation) -> list[str]:
    """What differs from the expected answers and counts, one text for each step; empty: nothing."""
    before = last_of_settled(_counting(exchange, conversation), still_s=0.15) if exchange.counted else {}
    answers = conversation.hold(exchange.steps)
    found = [
        _difference(f"step {number}", step.expect, answer)
        for number, (step, answer) in enumerate(zip(exchange.steps, answers, strict=True))
    ]
    if exchange.counted:
        count = _counting(exchange, conversation)

        def added() -> Any:
            return difference(before, count())

        first_equal(added, exchange.counts)
        # What is counted twice, or too late, comes after the counts were equal.
        found.append(_difference("counts", exchange.counts, last_of_settled(added, still_s=0.1)))
    return list(filter(None, found))


def _counting(exchange: Exchange, conversation: Conversation) -> Callable[[], Any]:
    return lambda: counts_of(conversation, exchange.counted)


def _difference(what: str, expected: object, actual: object) -> str:
    if canonical(expected) == canonical(actual):
        return ""
    lines = difflib.unified_diff(
        canonical(expected).splitlines(), canonical(actual).splitlines(), "expected", "answered", lineterm=""
    )
    return "\n".join([what, *lines])


def main() -> None:
    """Replay the exchanges of one run and exit with 1 if any differs."""
    parser = argparse.ArgumentParser(description="Replay the recorded exchanges to a real Triton.")
    parser.add_argument("--http", default="localhost:8000")
    parser.add_argument("--grpc", default="localhost:8001")
    parser.add_argument("--metrics", default="localhost:8002")
    parser.add_argument("--run", choices=RUNS, required=True)
    parser.add_argument("--topic", action="append")
    arguments = parser.parse_args()
    addresses = Addresses(http=arguments.http, grpc=arguments.grpc, metrics=arguments.metrics)
    equal = unequal = 0
    with Conversation(addresses) as conversation:
        for topic in load_topics():
            if topic.run != arguments.run or topic.name not in (arguments.topic or [topic.name]):
                continue
            for exchange in topic.exchanges:
                found = mismatches(exchange, conversation)
                equal, unequal = equal + (not found), unequal + bool(found)
                if found:
                    print(f"{topic.name}/{exchange.name}", *found, sep="\n")
    print(f"{equal} equal, {unequal} not")
    sys.exit(unequal > 0)


if __name__ == "__main__":
    main()
