"""Speculation: several tokens of a sequence in one step, where a draft foresees them.

The tokens that a sequence is about to have are drafted, and run in one forward behind its last one. Then
its tokens are picked one by one, as ever, from the model's own logits by its own rules and draws; as long as
what is picked is what was drafted, the next logits are there already. So the text is the one without
speculation, sampling included: it is the acceptance rule of Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding" (ICML 2023), and Chen et al. (2023), for a draft that has no doubts,
with the draw in the place of the coin.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from genserve.generation.beam import Beam
from genserve.generation.logits_model import LogitsArray, TokenArray
from genserve.generation.planner import Verify
from genserve.generation.residents import Occupant
from genserve.generation.token_sequence import TokenSequence

__all__ = ["Draft", "Speculation", "Verifier"]

logger = logging.getLogger(__name__)

_HOPE = 2.0             # of a draft so many tokens are right, before anything is known
_NEWEST = 0.2           # the weight of what was seen last
_HOPE_RETURNS = 0.005   # so much of the way back to it with each step in which a draft was not worth asking
_GUESSED_COST = 2.0     # of a verification, in decodes, before it was measured
_COST_FADES = 0.001     # with each such step, so that it is measured again
_LEAST_COST = 1.2


class Verifier(Protocol):
    """Runs `num_tokens` tokens in each of some slots at once, and each as a decode of it alone would."""

    @property
    def num_tokens(self) -> int:
        """Of each slot, in one call; two or more."""

    @property
    def max_rows(self) -> int:
        """How many slots a call may have."""

    def verify(self, token_ids: TokenArray, past: TokenArray) -> LogitsArray:
        """Run some tokens in each of the slots 0 to B-1, whose keys and values are written as by a decode.

        Args:
            token_ids: [B, num_tokens] int64.
            past: [B] int64, how many positions each slot holds already; it has room for all the tokens.

        Returns:
            [B * num_tokens, vocab_size] float32, the logits after each token, a slot's together; a view of
            a buffer that the next call overwrites.
        """


class Draft(Protocol):
    """Says what may come next."""

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may follow the last token of a sequence; none: no idea."""

    def drop(self, sequence: TokenSequence) -> None:
        """Forget a sequence, which leaves; fine if it is not known."""


class Speculation:
    """Decides from step to step whether a draft pays. Belongs to the engine's thread.

    What it decides changes when a text comes, and never the text: times may decide.

    Attributes:
        verifier: runs the drafts.
    """

    def __init__(self, verifier: Verifier, draft: Draft) -> None:
        self.verifier = verifier
        self._draft = draft
        self._has_failed = False
        self._hopes: dict[Occupant, float] = {}
        self._decode_s: dict[int, float] = {}       # by number of rows
        self._verify_s: dict[int, float] = {}

    def plan(self, sequences: Sequence[Occupant], *, num_rows: int) -> Verify | None:
        """Return a verification of what follows in these sequences; None if a decode is better.

        Args:
            sequences: each has tokens that are not computed. Beside a beam search nobody speculates.
            num_rows: slots of the call, idle ones included.
        """
        if num_rows > self.verifier.max_rows or any(isinstance(s, Beam) for s in sequences):
            return None
        cost = self._cost(num_rows)
        num_expected, tokens, num_known = 0.0, [], []
        for sequence in sequences:
            known = sequence.token_ids[sequence.num_computed :][: self.verifier.num_tokens]
            drafted = self._drafted(sequence, self.verifier.num_tokens - len(known), cost=cost)
            num_expected += len(known) + min(len(drafted), self._hopes.get(sequence, _HOPE))
            tokens.append((*known, *drafted))
            num_known.append(len(known))
        if num_expected <= cost * len(sequences):
            if num_rows in self._verify_s:
                self._verify_s[num_rows] *= 1 - _COST_FADES
            return None
        return Verify(
            sequences=tuple(sequences),
            tokens=tuple(tokens),
            num_known=tuple(num_known),
            width=self.verifier.num_tokens,
        )

    def note_step(self, *, num_rows: int, seconds: float, verified: bool) -> None:
        """Keep how long a step took, plan and forward."""
        known = self._verify_s if verified else self._decode_s
        guess = self._decode_s.get(num_rows, seconds / _GUESSED_COST) * _GUESSED_COST if verified else seconds
        before = known.get(num_rows, guess)
        # One that took far longer had to wait for others.
        known[num_rows] = _moved(before, min(seconds, 2 * before), _NEWEST)

    def note_outcome(self, sequence: TokenSequence, *, accepted: int) -> None:
        """Keep how many tokens of a draft were right."""
        self._hopes[sequence] = _moved(self._hopes.get(sequence, _HOPE), accepted, _NEWEST)

    def drop(self, sequence: TokenSequence) -> None:
        """Forget a sequence, which leaves."""
        self._hopes.pop(sequence, None)
        self._draft.drop(sequence)

    def _drafted(self, sequence: Occupant, count: int, *, cost: float) -> Sequence[int]:
        """Ask the draft, if there is any hope that it pays."""
        if count == 0 or not isinstance(sequence, TokenSequence):
            return ()
        hope = self._hopes.get(sequence, _HOPE)
        if 1 + hope > cost:
            return self._proposed(sequence, count)
        self._hopes[sequence] = _moved(hope, _HOPE, _HOPE_RETURNS)
        return ()

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

    def _cost(self, num_rows: int) -> float:
        """What a verification takes, in decodes."""
        decode_s, verify_s = self._decode_s.get(num_rows, 0.0), self._verify_s.get(num_rows, 0.0)
        return max(_LEAST_COST, verify_s / decode_s) if decode_s and verify_s else _GUESSED_COST


def _moved(value: float, target: float, share: float) -> float:
    return value + share * (target - value)
