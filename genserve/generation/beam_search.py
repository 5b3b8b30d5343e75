"""Beam search: one of a request, its beams, which step together, and the answers that they come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, takewhile

import numpy as np

from genserve.generation.beam import Beam, BeamText, Copy
from genserve.generation.beam_group import BeamGroup
from genserve.generation.beam_rules import BeamRules, Finished, log_softmax
from genserve.generation.likelihood import likelihood
from genserve.generation.logit_edits import apply_edits, join_edits
from genserve.generation.logits_model import FloatArray
from genserve.generation.token_sequence import TokenSequence
from genserve.request import TokenLogprob

__all__ = ["BeamSearch", "Reorder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reorder:
    """What a step makes of the beams' blocks."""

    copies: tuple[Copy, ...]        # in this order
    leaving: tuple[Beam, ...]       # they need theirs no more


class BeamSearch:
    """One beam search. Belongs to the engine's thread.

    Its beams run together and wait together. The first computes the prompt, and the others begin with its
    blocks. Where a step makes two beams of one, the worse takes the place of a beam that has ended.

    Attributes:
        answers: what the caller reads: as many of the best as it asks for, the best first. A token is
            appended to them when all that may still become one of them have it: none is ever taken back.
        lead: the beam that computes the prompt, and stands for all in the queue.
        beams: those that are followed, the best first.
        begun: all beams have tokens of their own.
        done: the answers are complete.
    """

    def __init__(self, answers: Sequence[TokenSequence], *, width: int, text: BeamText) -> None:
        """Begin before the prompt; from here on the answers belong to the search.

        Args:
            answers: with the same prompt and parameters; `width` at the most.
            width: how many beams; at least 2.
            text: of an answer before its first token; used where there are stop strings.
        """
        first = answers[0]
        params = first.params
        self.answers = tuple(answers)
        self.beams = [
            Beam(self, first.token_ids, text=text.fork() if params.stop else None) for _ in range(width)
        ]
        self.lead = self.beams[0]
        self.begun = False
        self.done = False
        self._max_new_tokens = first.max_new_tokens
        self._ending_ids = first.ending_ids
        self._num_sure = 0
        rules = BeamRules(
            width=width // params.num_beam_groups,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_new_tokens=self._max_new_tokens,
        )
        self._groups = [
            BeamGroup(
                self.beams[start : start + rules.width],
                rules=rules,
                num_endings=len(self._ending_ids),
                ends=self._ends,
            )
            for start in range(0, width, rules.width)
        ]
        for answer in answers:
            answer.beams = self

    def step(self, logits: FloatArray) -> Reorder | None:
        """Add a token to each beam, and to the answers those that are sure now.

        Args:
            logits: [R, V] float32, after the last tokens of the beams; of the lead alone, R = 1, where
                nothing follows the prompt yet. Not modified.

        Returns:
            What is to be done with the blocks; None: the logits are not finite, or the rules leave no token.
        """
        is_first = not self.begun
        if is_first:
            for answer in self.answers:
                answer.num_cached_tokens = self.lead.num_cached_tokens
        log_probs = log_softmax(logits)
        if not np.isfinite(log_probs.max(axis=1)).all():
            return None
        groups = [group for group in self._groups if not group.standings.done]
        ends = list(accumulate(len(group.beams) for group in groups))
        copies: list[Copy] = []
        taken: Counter[int] = Counter()
        for group, end in zip(groups, ends, strict=True):
            rows = slice(0, 1) if is_first else slice(end - len(group.beams), end)
            levels = self._edited(log_probs[rows], group.beams, taken=taken)
            made = group.step(levels, tell=partial(self._likelihood, logits[rows]))
            if made is None:
                return None
            copies += made
            taken.update(candidate.token_id for candidate in group.standings.live)
        self.begun = True
        if is_first:    # all go on from the prompt, whichever of them it is
            copies = [Copy(source=self.lead, target=beam) for beam in self.beams if beam is not self.lead]
        return self._reordered(groups, copies)

    def _edited(
        self, log_probs: FloatArray, beams: Sequence[Beam], *, taken: Mapping[int, int]
    ) -> FloatArray:
        """Return the log-probabilities with what the request changes of them, as transformers does it.

        What the groups before this one have taken at this step is worth less: Vijayakumar et al.,
        "Diverse Beam Search" (2016), with the Hamming diversity.
        """
        penalty = self.answers[0].params.diversity_penalty
        if penalty:
            log_probs = log_probs.copy()
            times = np.array(list(taken.values()), dtype=np.float32)
            log_probs[:, list(taken)] -= np.float32(penalty) * times
        beams = beams[: len(log_probs)]
        edits = [b.logit_rules.edits(b.token_ids, row=row) for row, b in enumerate(beams) if b.logit_rules]
        if edits:
            apply_edits(log_probs, join_edits(edits))
        return log_probs

    def _reordered(self, groups: Sequence[BeamGroup], copies: Sequence[Copy]) -> Reorder | None:
        """Go on with the groups that are not done, and append to the answers what is sure, or the best."""
        going = [group for group in groups if not group.standings.done]
        if not going:
            return self._end()
        leaving = [beam for group in groups if group.standings.done for beam in group.beams]
        self.beams = [beam for group in going for beam in group.beams]
        self._append_sure()
        return Reorder(copies=tuple(copies), leaving=tuple(leaving))

    def _likelihood(self, logits: FloatArray, row: int, token_id: int) -> list[TokenLogprob]:
        """Return how likely a token is, before any rule; nothing if that is not asked for."""
        params = self.answers[0].params
        if not params.logprobs:
            return []
        return [likelihood(logits[row], token_id, num_top=params.top_logprobs)]

    def _ends(self, beam: Beam, token_id: int) -> bool:
        """Whether a beam's answer is complete with this token."""
        return (
            token_id in self._ending_ids
            or len(beam.token_ids) + 1 - beam.num_prompt_tokens == self._max_new_tokens
            or beam.stops_with(token_id)
        )

    def _append_sure(self) -> None:
        """Append to all answers what the beams, and the complete ones that are among the best, agree on."""
        kept = self._ranked(group.standings.finished for group in self._groups)
        rivals = [b.token_ids[b.num_prompt_tokens + self._num_sure :] for b in self.beams]
        rivals += [[*f.hypothesis.token_ids[self._num_sure :]] for f in kept]
        columns = zip(*rivals, strict=False)
        common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
        end = self._num_sure + len(common)
        for answer in self.answers:
            _append(answer, common, self.beams[0].likelihoods[self._num_sure : end])
        self._num_sure = end

    def settle(self) -> None:
        """Append the rest of the best there are, complete or not; for those whose time is over."""
        if self.begun and not self.done:
            self.done = True
            self._append_best(self._ranked(group.best_so_far() for group in self._groups))

    def _end(self) -> Reorder | None:
        """Append the rest of the best; None if the rules have not left as many as are asked for."""
        self.done = True
        ranked = self._ranked(group.standings.finished for group in self._groups)
        if len(ranked) < len(self.answers):
            return None
        self._append_best(ranked)
        return Reorder(copies=(), leaving=())

    def _ranked(self, found: Iterable[Sequence[Finished]]) -> list[Finished]:
        """Return those that may be answers, the best first; there are not more than answers."""
        return sorted(chain(*found), key=lambda finished: -finished.score)[: len(self.answers)]

    def _append_best(self, ranked: Sequence[Finished]) -> None:
        for answer, finished in zip(self.answers, ranked, strict=False):
            rest = finished.hypothesis
            _append(answer, rest.token_ids[self._num_sure :], rest.likelihoods[self._num_sure :])


def _append(answer: TokenSequence, token_ids: Sequence[int], likelihoods: Sequence[TokenLogprob]) -> None:
    for index, token_id in enumerate(token_ids):
        answer.take_logprob(likelihoods[index] if likelihoods else None)
        answer.append(token_id)
