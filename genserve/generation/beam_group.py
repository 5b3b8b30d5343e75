"""Beam group: the token sequences of one beam search, which step together, and the answers they come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from genserve.generation.beam_search import (
    BeamRules,
    Candidate,
    Finished,
    Hypothesis,
    Search,
    advance,
    best,
    log_softmax,
)
from genserve.generation.likelihood import likelihood
from genserve.generation.logit_edits import apply_edits, join_edits
from genserve.generation.logits_model import FloatArray
from genserve.generation.token_sequence import AnswerText, TokenSequence
from genserve.request import TokenLogprob

__all__ = ["Beam", "BeamGroup", "Copy"]

# Of a beam that takes the place of one that is missing, because the rules leave too few.
_SPARE = -np.inf


class Beam:
    """One of the answers that a search follows: tokens in a slot of the cache, an `Occupant`.

    Belongs to the engine's thread. The attributes that it shares with a token sequence mean the same.

    Attributes:
        group: the search.
        num_slots: those that it needs: of the first beam, before the others have theirs, all of them.
        likelihoods: of its answer's tokens, if the request asks for them.
    """

    __slots__ = (
        "group",
        "likelihoods",
        "logit_rules",
        "num_cached_tokens",
        "num_computed",
        "num_prefilled",
        "num_prompt_tokens",
        "num_slots",
        "preempted",
        "token_ids",
    )

    def __init__(self, group: BeamGroup, prompt_token_ids: Sequence[int]) -> None:
        self.group = group
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_slots = 1
        self.num_computed = 0
        self.num_prefilled = 0
        self.num_cached_tokens = 0
        self.preempted = False
        self.likelihoods: list[TokenLogprob] = []
        self.logit_rules = group.answers[0].fresh_rules()

    @property
    def answer(self) -> list[int]:
        """Its tokens behind the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_pending(self) -> int:
        """How many tokens are not in the KV cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def cache_salt(self) -> str | None:
        """That of the request."""
        return self.group.answers[0].cache_salt

    @property
    def priority(self) -> int:
        """That of the request."""
        return self.group.answers[0].priority

    @property
    def in_prompt(self) -> bool:
        """Whether part of the prompt is still to be computed by a prefill."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def num_to_prefill(self) -> int:
        """How many tokens of the prompt are to be computed by a prefill."""
        return self.num_prompt_tokens - self.num_computed

    def preempt(self) -> None:
        """Begin anew, since its slot is somebody else's; the search stays where it is."""
        self.num_computed = self.num_prefilled = 0
        self.preempted = True

    def follow(self, other: Beam) -> None:
        """Become a copy of another beam."""
        self.token_ids = other.token_ids.copy()
        self.likelihoods = other.likelihoods.copy()
        self.logit_rules = self.group.answers[0].fresh_rules()


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The slot of `target` is to hold what that of `source` holds."""

    source: Beam
    target: Beam


class BeamGroup:
    """One beam search. Belongs to the engine's thread.

    Its beams get their slots together and lose them together. The first computes the prompt, the others
    begin with a copy. Where a step makes two beams of one, the better goes on in its slot, and the other in
    the slot of a beam that has ended.

    Attributes:
        answers: what the caller reads: as many of the best as it asks for, the best first. A token is
            appended to them when all that may still become one of them have it: none is ever taken back.
        beams: those that are followed, the best first.
        done: the answers are complete.
    """

    def __init__(
        self, answers: Sequence[TokenSequence], *, width: int, new_text: Callable[[], AnswerText]
    ) -> None:
        """Begin before the prompt; from here on the answers belong to the search.

        Args:
            answers: with the same prompt and parameters; `width` at the most.
            width: how many beams; at least 2.
            new_text: begins the text of an answer; used where there are stop strings.
        """
        first = answers[0]
        params = first.params
        self.answers = tuple(answers)
        self.beams = [Beam(self, first.token_ids) for _ in range(width)]
        self.lead.num_slots = width
        self.done = False
        self._rules = BeamRules(
            width=width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_new_tokens=first.max_new_tokens,
        )
        self._ending_ids = first.ending_ids
        # So many that, whatever ends, as many beams as before can go on.
        self._num_candidates = width * max(2, 1 + len(self._ending_ids))
        self._new_text = new_text if params.stop else None
        self._search = Search()
        self._scores = [0.0]
        self._num_sure = 0
        for answer in answers:
            answer.beams = self

    @property
    def lead(self) -> Beam:
        """The beam that computes the prompt."""
        return self.beams[0]

    @property
    def together(self) -> bool:
        """Whether all beams have their slots, or none: the lead does not wait for the others."""
        return self.lead.num_slots == 1

    def preempt(self) -> None:
        """Begin the computation of all but the lead anew, and need all slots again."""
        for beam in self.beams[1:]:
            beam.preempt()
        self.lead.num_slots = len(self.beams)

    def step(self, logits: FloatArray) -> list[Copy] | None:
        """Add a token to each beam, and to the answers those that are sure now.

        Args:
            logits: [R, V] float32, after the last tokens of the beams; of the lead alone, R = 1, where
                nothing follows the prompt yet. Not modified.

        Returns:
            The slots to be copied before the next forward; None: the logits are not finite, or the rules
            leave no token.
        """
        if not self.lead.answer:
            for answer in self.answers:
                answer.num_cached_tokens = self.lead.num_cached_tokens
        log_probs = log_softmax(logits)
        if not np.isfinite(log_probs.max(axis=1)).all():
            return None
        self._edit(log_probs)
        candidates = best(log_probs, scores=self._scores, count=self._num_candidates)
        if not candidates:
            return None
        self._search = advance(
            self._search,
            candidates,
            complete=lambda candidate: self._complete(candidate, logits),
            num_tokens=len(self.lead.token_ids) + 1 - self.lead.num_prompt_tokens,
            rules=self._rules,
        )
        if self._search.done:
            return self._end()
        copies = self._go_on(self._search.live, logits)
        self._append_sure()
        return copies

    def _edit(self, log_probs: FloatArray) -> None:
        """Apply what the request changes; transformers does it to the log-probabilities too."""
        beams = self.beams[: len(log_probs)]
        edits = [b.logit_rules.edits(b.token_ids, row=row) for row, b in enumerate(beams) if b.logit_rules]
        if edits:
            apply_edits(log_probs, join_edits(edits))

    def _likelihood(self, candidate: Candidate, logits: FloatArray) -> list[TokenLogprob]:
        """Return how likely a candidate's token is, before any rule; nothing if that is not asked for."""
        params = self.answers[0].params
        if not params.logprobs:
            return []
        return [likelihood(logits[candidate.beam], candidate.token_id, num_top=params.top_logprobs)]

    def _complete(self, candidate: Candidate, logits: FloatArray) -> Hypothesis | None:
        """Return the answer that a candidate's token completes, if it does."""
        beam = self.beams[candidate.beam]
        token_ids = (*beam.answer, candidate.token_id)
        ends = (
            candidate.token_id in self._ending_ids
            or len(token_ids) == self._rules.max_new_tokens
            or self._stops(token_ids)
        )
        if not ends:
            return None
        likelihoods = (*beam.likelihoods, *self._likelihood(candidate, logits))
        return Hypothesis(token_ids=token_ids, likelihoods=likelihoods)

    def _stops(self, token_ids: Sequence[int]) -> bool:
        """Whether a stop string has appeared; a text cannot be forked, so it is written anew."""
        if self._new_text is None:
            return False
        text = self._new_text()
        for token_id in token_ids:
            text.push(token_id)
        return text.stop is not None

    def _go_on(self, live: Sequence[Candidate], logits: FloatArray) -> list[Copy]:
        """Make the beams those that the search goes on with; returns the slots to be copied."""
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
            beam.token_ids.append(candidate.token_id)
            beam.likelihoods += self._likelihood(candidate, logits)
        self.beams, self._scores = beams, [candidate.score for candidate in following]
        return copies

    def _append_sure(self) -> None:
        """Append to all answers what the beams, and the complete ones that are among the best, agree on."""
        kept = self._search.finished[: len(self.answers)]
        rivals = [b.token_ids[b.num_prompt_tokens + self._num_sure :] for b in self.beams]
        rivals += [[*f.hypothesis.token_ids[self._num_sure :]] for f in kept]
        columns = zip(*rivals, strict=False)
        common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
        end = self._num_sure + len(common)
        for answer in self.answers:
            _append(answer, common, self.lead.likelihoods[self._num_sure : end])
        self._num_sure = end

    def settle(self) -> None:
        """Append the rest of the best there are, complete or not; for those whose time is over."""
        if self.done or not self.lead.answer:
            return
        self.done = True
        answers = [
            Hypothesis(token_ids=tuple(b.answer), likelihoods=tuple(b.likelihoods)) for b in self.beams
        ]
        length = len(self.lead.answer) ** self._rules.length_penalty
        begun = [
            Finished(hypothesis=hypothesis, score=score / length)
            for hypothesis, score in zip(answers, self._scores, strict=True)
        ]
        self._append_best(sorted([*self._search.finished, *begun], key=lambda f: -f.score))

    def _end(self) -> list[Copy] | None:
        """Append the rest of the best; None if the rules have not left as many as are asked for."""
        self.done = True
        if len(self._search.finished) < len(self.answers):
            return None
        self._append_best(self._search.finished)
        return []

    def _append_best(self, ranked: Sequence[Finished]) -> None:
        for answer, finished in zip(self.answers, ranked, strict=False):
            rest = finished.hypothesis
            _append(answer, rest.token_ids[self._num_sure :], rest.likelihoods[self._num_sure :])


def _append(answer: TokenSequence, token_ids: Sequence[int], likelihoods: Sequence[TokenLogprob]) -> None:
    for index, token_id in enumerate(token_ids):
        answer.take_logprob(likelihoods[index] if likelihoods else None)
        answer.append(token_id)
