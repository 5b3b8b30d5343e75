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
from genserve.engine.beam_rules import (
    BeamRules,
    BeamState,
    Candidate,
    Hypothesis,
    ScoredHypothesis,
    advance,
    best_candidates,
    log_softmax,
)
from genserve.engine.delta_builder import AnswerText
from genserve.engine.engine_request import Request, SequenceGroup
from genserve.engine.token_sequence import TokenSequence
from genserve.sampling.logits_array import FloatArray
from genserve.sampling.logits_processors import apply_edits, join_edits
from genserve.sampling.sampler import token_logprob

# Score of a beam that takes the place of a missing one, if the logits processors leave too few candidates.
_SPARE = -np.inf
# (row, token id) -> the token's log-probability in that row; empty if the request does not ask for it.
_LogprobsOf: TypeAlias = Callable[[int, int], list[TokenLogprob]]
# (source, target): beam `target` continues beam `source`.
_Copy: TypeAlias = tuple["Beam", "Beam"]


class BeamText(AnswerText, Protocol):
    """The text of a beam, read only for its stop strings."""

    def fork(self) -> BeamText:
        """Return an independent copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamReorder:
    """How one step of a search changes the blocks of its beams."""

    copies: tuple[_Copy, ...]       # to be made in this order
    ended: tuple[Beam, ...]         # their blocks are freed


class Beam(Request):
    """One of the candidate answers of a search. Belongs to the engine's thread.

    Attributes:
        logprobs: log-probabilities of the answer's tokens, if the request asks for them.
        text: the text of its answer; None: there are no stop strings.
    """

    __slots__ = ("_search", "logprobs", "processors", "text")

    def __init__(self, search: BeamSearch, prompt_token_ids: Sequence[int], *, text: BeamText | None) -> None:
        super().__init__(prompt_token_ids, cache_salt=search.choices[0].cache_salt)
        self._search = search
        self.text = text
        self.logprobs: list[TokenLogprob] = []
        self.processors = search.choices[0].sampling.fresh_processors()

    @property
    def answer(self) -> list[int]:
        """The beam's tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def group(self) -> BeamSearch:
        """The search."""
        return self._search

    def stops_with(self, token_id: int) -> bool:
        """Whether this token would complete a stop string."""
        if self.text is None:
            return False
        text = self.text.fork()
        text.push(token_id)
        return text.stop is not None

    def append(self, token_id: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Add a token to the answer, and its log-probability if the request asks for it."""
        self.token_ids.append(token_id)
        self.logprobs += logprobs
        if self.text is not None:
            self.text.push(token_id)

    def copy_from(self, other: Beam) -> None:
        """Copy the answer of another beam."""
        self.token_ids = other.token_ids.copy()
        self.text = other.text.fork() if other.text is not None else None
        self.logprobs = other.logprobs.copy()
        self.processors = self._search.choices[0].sampling.fresh_processors()


class BeamGroup:
    """Beams that compete with each other; `num_beam_groups` of them make a search.

    Belongs to the engine's thread.

    Attributes:
        beams: the beams, the best first.
        state: the state of the search over the beams.
    """

    def __init__(
        self,
        beams: Sequence[Beam],
        *,
        rules: BeamRules,
        num_ending_ids: int,
        ends: Callable[[Beam, int], bool],
    ) -> None:
        """Start before the first token; `ends` returns whether a token completes the answer of a beam."""
        self.beams = list(beams)
        self.state = BeamState()
        self._rules = rules
        self._ends = ends
        # Enough that all beams can continue whichever candidates end.
        self._num_candidates = rules.width * max(2, 1 + num_ending_ids)
        self._scores = [0.0]

    def step(self, log_probs: FloatArray, *, logprobs_of: _LogprobsOf) -> list[_Copy] | None:
        """Add a token to each beam.

        Args:
            log_probs: [R, V] float32, after the last tokens of the beams; R = 1 after the prompt.
            logprobs_of: returns the log-probabilities of a token that is appended.

        Returns:
            Pairs (source, target) of beams, empty if the search is done; None: no token is possible.
        """
        candidates = best_candidates(log_probs, scores=self._scores, count=self._num_candidates)
        if not candidates:
            return None
        self.state = advance(
            self.state,
            candidates,
            complete=lambda candidate: self._complete(candidate, logprobs_of),
            num_tokens=len(self.beams[0].answer) + 1,
            rules=self._rules,
        )
        return [] if self.state.done else self._continue(logprobs_of)

    def best_so_far(self) -> list[ScoredHypothesis]:
        """Return the best hypotheses, complete or not; needs at least one token."""
        if self.state.done:
            return list(self.state.finished)
        length = len(self.beams[0].answer) ** self._rules.length_penalty
        incomplete = [
            ScoredHypothesis(
                hypothesis=Hypothesis(token_ids=tuple(beam.answer), logprobs=tuple(beam.logprobs)),
                score=score / length,
            )
            for beam, score in zip(self.beams, self._scores, strict=True)
        ]
        return [*self.state.finished, *incomplete]

    def _complete(self, candidate: Candidate, logprobs_of: _LogprobsOf) -> Hypothesis | None:
        """Return the hypothesis that a candidate's token completes, if it does."""
        beam = self.beams[candidate.beam]
        if not self._ends(beam, candidate.token_id):
            return None
        logprobs = (*beam.logprobs, *logprobs_of(candidate.beam, candidate.token_id))
        return Hypothesis(token_ids=(*beam.answer, candidate.token_id), logprobs=logprobs)

    def _continue(self, logprobs_of: _LogprobsOf) -> list[_Copy]:
        """Reorder the beams by the live candidates and append their tokens; return which continue which.

        If two candidates continue one beam, the second takes the place of a beam that has ended.
        """
        live = self.state.live
        spare = [replace(live[0], score=_SPARE)] * (len(self.beams) - len(live))
        following = [*live, *spare]
        parents = [self.beams[candidate.beam] for candidate in following]
        free = [beam for beam in self.beams if beam not in parents]
        copies: list[_Copy] = []
        beams: list[Beam] = []
        for parent in parents:
            if parent in beams:
                copies.append((parent, free.pop()))
                beams.append(copies[-1][1])
            else:
                beams.append(parent)
        for source, target in copies:
            target.copy_from(source)
        for beam, candidate in zip(beams, following, strict=True):
            beam.append(candidate.token_id, logprobs_of(candidate.beam, candidate.token_id))
        self.beams, self._scores = beams, [candidate.score for candidate in following]
        return copies


class BeamSearch(SequenceGroup):
    """One beam search. Belongs to the engine's thread.

    Its beams run together and wait together. The first beam computes the prompt, and the other beams start
    from its blocks.

    Attributes:
        beams: the live beams, the best first.
        has_forked: each beam has its own tokens.
        done: the choices are complete.
    """

    __slots__ = (
        "_choices",
        "_ending_ids",
        "_groups",
        "_max_new_tokens",
        "_num_common",
        "beams",
        "done",
        "has_forked",
    )

    def __init__(self, choices: Sequence[TokenSequence], *, width: int, text: BeamText) -> None:
        """Start before the prompt; from now on the choices belong to the search.

        There are at most `width` choices, with the same prompt and parameters; `width` is at least 2.
        `text` is an answer's text before its first token, used if there are stop strings.
        """
        first = choices[0]
        params = first.params
        super().__init__(priority=first.priority, share=first.share)
        self._choices = tuple(choices)
        self.beams = [
            Beam(self, first.token_ids, text=text.fork() if params.stop else None) for _ in range(width)
        ]
        self.has_forked = False
        self.done = False
        self._max_new_tokens = first.max_new_tokens
        self._ending_ids = first.ending_ids
        self._num_common = 0    # tokens that have been appended to all choices
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
                num_ending_ids=len(self._ending_ids),
                ends=self._ends,
            )
            for start in range(0, width, rules.width)
        ]
        for choice in choices:
            choice.search = self

    @property
    def choices(self) -> Sequence[TokenSequence]:
        """The sequences that the caller reads, the best first.

        A token is appended to them once every hypothesis that may still win has it, so none is ever removed
        again.
        """
        return self._choices

    @property
    def requests(self) -> Sequence[Beam]:
        """All live beams, or the first one alone while it computes the prompt."""
        return self.beams if self.has_forked else self.beams[:1]

    @property
    def num_seqs(self) -> int:
        """How many beams are live."""
        return len(self.beams)

    def step(self, logits: FloatArray) -> BeamReorder | None:
        """Add a token to each beam, and append to the choices the tokens that have become certain.

        Args:
            logits: [R, V] float32, after the last tokens of the beams; after the prompt, R = 1. Not modified.

        Returns:
            How the blocks change; None: the logits are not finite, or the processors leave no token.
        """
        first = None if self.has_forked else self.beams[0]
        if first is not None:
            for request in (*self.choices, *self.beams):
                request.num_cached_tokens = first.num_cached_tokens
            for beam in self.beams:
                beam.adapter = first.adapter
        log_probs = log_softmax(logits)
        if not np.isfinite(log_probs.max(axis=1)).all():
            return None
        groups = [group for group in self._groups if not group.state.done]
        ends = list(accumulate(len(group.beams) for group in groups))
        copies: list[_Copy] = []
        taken: Counter[int] = Counter()
        for group, end in zip(groups, ends, strict=True):
            rows = slice(0, 1) if first is not None else slice(end - len(group.beams), end)
            edited = self._edited(log_probs[rows], group.beams, taken=taken)
            moved = group.step(edited, logprobs_of=partial(self._logprobs_of, logits[rows]))
            if moved is None:
                return None
            copies += moved
            taken.update(candidate.token_id for candidate in group.state.live)
        self.has_forked = True
        if first is not None:   # every beam continues the prompt, whatever their order
            copies = [(first, beam) for beam in self.beams if beam is not first]
        return self._reorder(groups, copies)

    def _edited(
        self, log_probs: FloatArray, beams: Sequence[Beam], *, taken: Mapping[int, int]
    ) -> FloatArray:
        """Return the log-probabilities as the request's processors change them, like transformers.

        Tokens that earlier groups took at this step are penalised: Vijayakumar et al., "Diverse Beam
        Search" (2016), with the Hamming diversity.
        """
        penalty = self.choices[0].params.diversity_penalty
        if penalty:
            log_probs = log_probs.copy()
            times = np.array(list(taken.values()), dtype=np.float32)
            log_probs[:, list(taken)] -= np.float32(penalty) * times
        beams = beams[: len(log_probs)]
        edits = [b.processors.edits(b.token_ids, row=row) for row, b in enumerate(beams) if b.processors]
        if edits:
            apply_edits(log_probs, join_edits(edits))
        return log_probs

    def _reorder(self, groups: Sequence[BeamGroup], copies: Sequence[_Copy]) -> BeamReorder | None:
        """Continue the unfinished groups; append the common tokens to the choices, or the best hypotheses."""
        live = [group for group in groups if not group.state.done]
        if not live:
            return self._end()
        ended = [beam for group in groups if group.state.done for beam in group.beams]
        self.beams = [beam for group in live for beam in group.beams]
        self._append_common()
        return BeamReorder(copies=tuple(copies), ended=tuple(ended))

    def _logprobs_of(self, logits: FloatArray, row: int, token_id: int) -> list[TokenLogprob]:
        """Return the token's log-probability before any processor; empty if it is not asked for."""
        params = self.choices[0].params
        if not params.logprobs:
            return []
        return [token_logprob(logits[row], token_id, num_top=params.top_logprobs)]

    def _ends(self, beam: Beam, token_id: int) -> bool:
        """Whether this token completes the answer of this beam."""
        return (
            token_id in self._ending_ids
            or len(beam.token_ids) + 1 - beam.num_prompt_tokens == self._max_new_tokens
            or beam.stops_with(token_id)
        )

    def _append_common(self) -> None:
        """Append to all choices the tokens that all beams and all hypotheses that may win have in common."""
        kept = self._ranked(group.state.finished for group in self._groups)
        rivals = [b.token_ids[b.num_prompt_tokens + self._num_common :] for b in self.beams]
        rivals += [[*f.hypothesis.token_ids[self._num_common :]] for f in kept]
        columns = zip(*rivals, strict=False)
        common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
        end = self._num_common + len(common)
        for choice in self.choices:
            _append(choice, common, self.beams[0].logprobs[self._num_common : end])
        self._num_common = end

    def conclude(self) -> None:
        """Append the rest of the best hypotheses, complete or not; does nothing once the search is done."""
        if self.has_forked and not self.done:
            self.done = True
            self._append_best(self._ranked(group.best_so_far() for group in self._groups))

    def _end(self) -> BeamReorder | None:
        """Append the rest of the best hypotheses; None if there are fewer than choices."""
        self.done = True
        ranked = self._ranked(group.state.finished for group in self._groups)
        if len(ranked) < len(self.choices):
            return None
        self._append_best(ranked)
        return BeamReorder(copies=(), ended=())

    def _ranked(self, found: Iterable[Sequence[ScoredHypothesis]]) -> list[ScoredHypothesis]:
        """Return the best hypotheses, the best first; at most one for each choice."""
        return sorted(chain(*found), key=lambda finished: -finished.score)[: len(self.choices)]

    def _append_best(self, ranked: Sequence[ScoredHypothesis]) -> None:
        for choice, finished in zip(self.choices, ranked, strict=False):
            rest = finished.hypothesis
            _append(choice, rest.token_ids[self._num_common :], rest.logprobs[self._num_common :])


def _append(choice: TokenSequence, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
    for index, token_id in enumerate(token_ids):
        choice.set_logprob(token_id, logprobs[index] if logprobs else None)
        choice.append(token_id)
