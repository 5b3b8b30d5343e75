"""Synthetic load: requests at a rate, with drawn lengths, shared system prompts and sessions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from genserve.bench.arrivals import arrival_times
from genserve.planner.planned_request import PlannedRequest

_SESSION_IDS = 1 << 24      # token ids of one session


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The distribution of a number of tokens: log-normal, at least 1."""

    mean: float
    variation: float = 0.0      # standard deviation / mean; 0: all are the same

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return `count` lengths."""
        if not self.variation:
            return [max(1, round(self.mean))] * count
        variance = math.log(1 + self.variation**2)
        drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return [max(1, round(float(length))) for length in drawn]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticLoad:
    """Users that arrive at a rate; each has a session of some turns, at a pace of its own.

    A turn's prompt is the system prompt, all earlier turns with their answers, and a new message.
    """

    num_requests: int           # of all turns together
    rate: float                 # requests per second, of all turns together
    burstiness: float = 1.0     # of the arrivals of sessions; 1: a Poisson process
    input_len: Lengths          # of the message of a turn
    output_len: Lengths
    num_system_prompts: int = 0     # each session begins with one of these; 0: with none
    system_len: int = 0
    num_turns: int = 1
    think_s: float = 0.0        # mean time from an answer to the next turn; exponentially distributed
    seed: int = 0

    def requests(self) -> Iterator[PlannedRequest]:
        """Yield the first turns of all sessions, in the order of their arrival."""
        rng = np.random.default_rng(self.seed)
        count, turns = math.ceil(self.num_requests / self.num_turns), self.num_turns
        arrivals_s = arrival_times(
            count, rate=self.rate / self.num_turns, burstiness=self.burstiness, rng=rng
        )
        inputs, outputs = self.input_len.draw(rng, count * turns), self.output_len.draw(rng, count * turns)
        thinking_s = rng.exponential(self.think_s, count * turns).tolist()
        systems = rng.integers(max(1, self.num_system_prompts), size=count).tolist()
        # System prompts have the ids before those of the first session.
        first_session = -(-self.num_system_prompts * self.system_len // _SESSION_IDS)
        for number, (arrived_s, system) in enumerate(zip(arrivals_s, systems, strict=True)):
            places = slice(number * turns, (number + 1) * turns)
            session = _Session(
                lengths=list(zip(inputs[places], outputs[places], strict=True)), thinking_s=thinking_s[places]
            )
            first_id, num_input = (first_session + number) * _SESSION_IDS, inputs[number * turns]
            prompt = [range(first_id, first_id + num_input)]
            if self.num_system_prompts and self.system_len:
                prompt.insert(0, range(system * self.system_len, (system + 1) * self.system_len))
            end = first_id + num_input
            yield PlannedRequest(
                arrived_s=arrived_s,
                prompt=tuple(prompt),
                answer=range(end, end + outputs[number * turns]),
                session=session if turns > 1 else None,
            )


class _Session:
    """The turns of one user."""

    def __init__(self, *, lengths: list[tuple[int, int]], thinking_s: list[float]) -> None:
        self._lengths = lengths
        self._thinking_s = thinking_s
        self._turn = 0

    def next_turn(self, request: PlannedRequest, *, ended_s: float) -> PlannedRequest | None:
        """See `Session`."""
        self._turn += 1
        if self._turn == len(self._lengths):
            return None
        num_input, num_output = self._lengths[self._turn]
        *system, own = request.prompt
        end = request.answer.stop + num_input
        return replace(
            request,
            arrived_s=ended_s + self._thinking_s[self._turn],
            prompt=(*system, range(own.start, end)),
            answer=range(end, end + num_output),
        )
