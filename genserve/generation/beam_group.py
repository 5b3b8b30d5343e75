"""Beam group: beams that compete with each other; a search has several where it asks for groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from genserve.generation.beam import Beam, Copy
from genserve.generation.beam_rules import (
    BeamRules,
    Candidate,
    Finished,
    Hypothesis,
    Standings,
    advance,
    best,
)
from genserve.generation.logits_model import FloatArray
from genserve.request import TokenLogprob

__all__ = ["BeamGroup", "Tell"]

# Of a beam that takes the place of one that is missing, because the rules leave too few.
_SPARE = -np.inf
# Tells how likely a token is behind a row of logits; nothing if that is not asked for.
Tell: TypeAlias = Callable[[int, int], list[TokenLogprob]]


class BeamGroup:
    """The search over some beams. Belongs to the engine's thread.

    Attributes:
        beams: those that are followed, the best first.
        standings: what is known.
    """

    def __init__(
        self,
        beams: Sequence[Beam],
        *,
        rules: BeamRules,
        num_endings: int,
        ends: Callable[[Beam, int], bool],
    ) -> None:
        """Begin before the first token.

        Args:
            beams: `rules.width` of them.
            rules: of the search.
            num_endings: how many tokens end an answer.
            ends: whether this token, behind a beam's, completes its answer.
        """
        self.beams = list(beams)
        self.standings = Standings()
        self._rules = rules
        self._ends = ends
        # So many that, whatever ends, as many beams as before can go on.
        self._num_candidates = rules.width * max(2, 1 + num_endings)
        self._scores = [0.0]

    def step(self, log_probs: FloatArray, *, tell: Tell) -> list[Copy] | None:
        """Add a token to each beam.

        Args:
            log_probs: [R, V] float32, after the last tokens of the beams, R = 1 behind the prompt.
            tell: asked about the tokens that are taken.

        Returns:
            Which beams go on from others, none if the search is done; None: the rules leave no token.
        """
        candidates = best(log_probs, scores=self._scores, count=self._num_candidates)
        if not candidates:
            return None
        self.standings = advance(
            self.standings,
            candidates,
            complete=lambda candidate: self._complete(candidate, tell),
            num_tokens=len(self.beams[0].answer) + 1,
            rules=self._rules,
        )
        return [] if self.standings.done else self._go_on(tell)

    def best_so_far(self) -> list[Finished]:
        """Return the best there are, complete or not; needs a token."""
        if self.standings.done:
            return list(self.standings.finished)
        length = len(self.beams[0].answer) ** self._rules.length_penalty
        begun = [
            Finished(
                hypothesis=Hypothesis(token_ids=tuple(beam.answer), likelihoods=tuple(beam.likelihoods)),
                score=score / length,
            )
            for beam, score in zip(self.beams, self._scores, strict=True)
        ]
        return [*self.standings.finished, *begun]

    def _complete(self, candidate: Candidate, tell: Tell) -> Hypothesis | None:
        """Return the answer that a candidate's token completes, if it does."""
        beam = self.beams[candidate.beam]
        if not self._ends(beam, candidate.token_id):
            return None
        likelihoods = (*beam.likelihoods, *tell(candidate.beam, candidate.token_id))
        return Hypothesis(token_ids=(*beam.answer, candidate.token_id), likelihoods=likelihoods)

    def _go_on(self, tell: Tell) -> list[Copy]:
        """Make the beams those that the search goes on with; returns which go on from others."""
        live = self.standings.live
        spare = [replace(live[0], score=_SPARE)] * (len(self.beams) - len(live))
        following = [*live, *spare]
        parents = [self.beams[candidate.beam] for candidate in following]
        free = [beam for beam in self.beams if beam not in parents]
        copies: list[Copy] = []
        beams: list[Beam] = []
        for parent in parents:
            if parent in beams:
                copies.append(Copy(source=parent, target=free.pop()))
                beams.append(copies[-1].target)
            else:
                beams.append(parent)
        for copy in copies:
            copy.target.follow(copy.source)
        for beam, candidate in zip(beams, following, strict=True):
            beam.append(candidate.token_id, tell(candidate.beam, candidate.token_id))
        self.beams, self._scores = beams, [candidate.score for candidate in following]
        return copies
