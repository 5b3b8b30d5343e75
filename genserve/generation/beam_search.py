"""Beam search: the beams of a request step together; the best become its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, takewhile
from typing import Protocol, TypeAlias

import numpy as np

from genserve.completion import TokenLogprob
from genserve.generation.beam_rules import (
    BeamRules,
    Candidate,
    Finished,
    Hypothesis,
    Standings,
    advance,
    best,
    log_softmax,
)
from genserve.generation.engine_request import LogitsConsumer, Request, TokenSequence
from genserve.generation.logits_model import FloatArray
from genserve.sampling.logits_edits import apply_edits, join_edits
from genserve.sampling.sampler import token_logprob

__all__ = ["Beam", "BeamGroup", "BeamSearch", "BeamText", "Copy", "Reorder", "Tell"]


class BeamText(Protocol):
    """The text of a beam, as far as it tells where it has to end."""

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text; None as long as it goes on."""

    def push(self, token_id: int) -> str:
        """Take one more token."""

    def fork(self) -> BeamText:
        """Return one with the same tokens, which goes on by itself."""


class Beam(Request):
    """One of the answers that a search follows: tokens in the KV cache; a `Request`.

    Belongs to the engine's thread.

    Attributes:
        search: that follows it.
        likelihoods: of its answer's tokens, if the request asks for them.
        text: of its answer; None: no stop string ends it.
    """

    __slots__ = ("likelihoods", "processors", "search", "text")

    def __init__(
        self, search: BeamSearch, prompt_token_ids: Sequence[int], *, text: BeamText | None
    ) -> None:
        super().__init__(prompt_token_ids)
        self.search = search
        self.text = text
        self.likelihoods: list[TokenLogprob] = []
        self.processors = search.answers[0].sampling.fresh_processors()

    @property
    def answer(self) -> list[int]:
        """Its tokens behind the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def cache_salt(self) -> str | None:
        """That of the request."""
        return self.search.answers[0].cache_salt

    @property
    def priority(self) -> int:
        """That of the request."""
        return self.search.answers[0].priority

    @property
    def lead(self) -> Beam:
        """See `Request`."""
        return self.search.lead

    @property
    def group(self) -> Sequence[Beam]:
        """See `Request`: all that are followed, or the lead, as long as it computes the prompt."""
        return self.search.beams if self.search.begun else (self,)

    @property
    def num_seqs(self) -> int:
        """See `Request`."""
        return len(self.search.beams)

    @property
    def answers(self) -> Sequence[Request]:
        """See `Request`."""
        return self.search.answers

    def take_logits(self, taker: LogitsConsumer, row: int) -> None:
        """See `Request`: its search goes on."""
        taker.search(self, row)

    def stops_with(self, token_id: int) -> bool:
        """Whether a stop string would be there, if this token came next."""
        if self.text is None:
            return False
        text = self.text.fork()
        text.push(token_id)
        return text.stop is not None

    def append(self, token_id: int, likelihoods: Sequence[TokenLogprob]) -> None:
        """Add a token to the answer, and how likely it was, if the request asks for that."""
        self.token_ids.append(token_id)
        self.likelihoods += likelihoods
        if self.text is not None:
            self.text.push(token_id)

    def follow(self, other: Beam) -> None:
        """Become a copy of another beam."""
        self.token_ids = other.token_ids.copy()
        self.text = other.text.fork() if other.text is not None else None
        self.likelihoods = other.likelihoods.copy()
        self.processors = self.search.answers[0].sampling.fresh_processors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Beam `target` goes on from what beam `source` has computed."""

    source: Beam
    target: Beam


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
        edits = [b.processors.edits(b.token_ids, row=row) for row, b in enumerate(beams) if b.processors]
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
        return [token_logprob(logits[row], token_id, num_top=params.top_logprobs)]

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
