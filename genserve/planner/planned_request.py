"""Planned request: one request of a simulated load, whose tokens are numbers without a meaning."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Protocol


class Session(Protocol):
    """The requests of one user, each sent some time after the answer to the one before."""

    def next_turn(self, request: PlannedRequest, *, ended_s: float) -> PlannedRequest | None:
        """Return the request after one whose answer ended at `ended_s`; None: it was the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """When a request arrives, and its tokens.

    Equal token ids mean equal tokens, so that prompts with the same beginning share blocks of the KV cache.
    """

    arrived_s: float
    prompt: tuple[range, ...]       # token ids; the ranges follow each other
    answer: range                   # token ids; at least one
    session: Session | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt."""
        return sum(map(len, self.prompt))

    def token_ids(self) -> list[int]:
        """Return the token ids of the prompt."""
        return list(chain.from_iterable(self.prompt))
