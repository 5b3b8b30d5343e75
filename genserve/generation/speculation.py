"""Speculation: several tokens of a sequence in one step, where a draft foresees them.

The tokens that a sequence is about to have are drafted, and run in the same forward behind its last one. Then
its tokens are picked one by one, as ever, from the model's own logits by its own rules and draws; as long as
what is picked is what was drafted, the next logits are there already. So the text is the one without
speculation, sampling included: it is the acceptance rule of Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding" (ICML 2023), and Chen et al. (2023), for a draft that has no doubts,
with the draw in the place of the coin.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from genserve.generation.request import Request
from genserve.generation.token_sequence import TokenSequence

__all__ = ["Draft", "Speculation"]

logger = logging.getLogger(__name__)

# Before anything is known, drafted tokens count as if so many had been right and so many wrong.
_RIGHT_AT_FIRST = 2.0
_WRONG_AT_FIRST = 1.0
_NEWEST = 0.2           # the weight of the last draft
_FORGIVEN = 0.005       # so much of the way back to the first guess with each step without a draft


class Draft(Protocol):
    """Says what may come next."""

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may follow the last token of a sequence; none: no idea."""

    def drop(self, sequence: TokenSequence) -> None:
        """Forget a sequence, which leaves; fine if it is not known."""


@dataclass(slots=True)
class _Record:
    """How often the drafts of one sequence were right, the last ones more than others."""

    sequence: TokenSequence
    num_right: float = _RIGHT_AT_FIRST
    num_wrong: float = _WRONG_AT_FIRST

    def move(self, num_right: float, num_wrong: float, share: float) -> None:
        self.num_right += share * (num_right - self.num_right)
        self.num_wrong += share * (num_wrong - self.num_wrong)


class Speculation:
    """Decides for each sequence how many tokens are worth being drafted. Belongs to the engine's thread.

    What it decides changes when a text comes, and never the text: times may decide.
    """

    def __init__(self, draft: Draft, *, num_tokens: int = 5) -> None:
        """Begin without experience.

        Args:
            draft: says what may come next.
            num_tokens: of a sequence in a step, at the most.
        """
        self._draft = draft
        self._num_tokens = num_tokens
        self._has_failed = False
        self._records: dict[Request, _Record] = {}

    def draft(self, sequence: TokenSequence, *, max_tokens: int, least_chance: float) -> Sequence[int]:
        """Return tokens that may follow the last one of a sequence; none, if that does not pay.

        Args:
            sequence: of which all tokens but the last are computed.
            max_tokens: at the most.
            least_chance: how likely the last of them must be right to be worth its part of a step.
        """
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = _Record(sequence)
        chance = record.num_right / (record.num_right + record.num_wrong)
        count, likely = 0, chance
        while count < min(max_tokens, self._num_tokens) and likely >= least_chance:
            count, likely = count + 1, likely * chance
        if count:
            return self._proposed(sequence, count)
        record.move(_RIGHT_AT_FIRST, _WRONG_AT_FIRST, _FORGIVEN)
        return ()

    def note_outcome(self, sequence: Request, *, num_drafted: int, num_accepted: int) -> None:
        """Learn how many tokens of a draft were right."""
        if sequence in self._records:
            self._records[sequence].move(num_accepted, num_accepted < num_drafted, _NEWEST)

    def drop(self, request: Request) -> None:
        """Forget a request, which leaves."""
        record = self._records.pop(request, None)
        if record is not None:
            self._draft.drop(record.sequence)

    def _proposed(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Ask the draft. One that fails is asked no more: answers do without it."""
        if self._has_failed:
            return ()
        try:
            return self._draft.propose(sequence, count)[:count]
        except Exception:
            logger.exception("drafting failed; there will be no drafts until the model is loaded again")
            self._has_failed = True
            return ()
