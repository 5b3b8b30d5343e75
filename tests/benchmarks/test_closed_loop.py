"""The closed loop over engines in their process."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks.peers.closed_loop import closed_loop


class CountingEngine:
    """Generates one or two tokens per request and step, and records the concurrency."""

    def __init__(self, *, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.missing: dict[int, int] = {}
        self.most_at_once = 0

    def add(self, number: int, prompt: str, *, new_tokens: int) -> int:
        self.missing[number] = new_tokens
        self.most_at_once = max(self.most_at_once, len(self.missing))
        return len(prompt.split())

    def step(self) -> Mapping[int, int]:
        arrived = {number: min(self.tokens_per_step, left) for number, left in self.missing.items()}
        self.missing = {n: left - arrived[n] for n, left in self.missing.items() if left > arrived[n]}
        return arrived


@pytest.mark.parametrize("tokens_per_step", [1, 2])
def test_every_token_of_every_request_is_counted_once(tokens_per_step: int) -> None:
    engine = CountingEngine(tokens_per_step=tokens_per_step)
    measured = closed_loop(engine, ["a b", "c", "d e f", "g", "h"], concurrency=3, new_tokens=5)
    assert engine.most_at_once == 3
    assert measured["prompt_tokens"] == [2, 1, 3, 1, 1]
    assert measured["new_tokens"] == [5] * 5
    assert len(measured["first_text_s"]) == 5
    assert len(measured["first_text_s"]) + len(measured["gaps_s"]) == 5 * 5
    assert max(measured["first_text_s"]) <= measured["elapsed_s"]
