"""Beam rules: which continuations of the beams are the likeliest, token by token; pure.

The rules, and the order in which they apply, are the same as in `transformers.generate(num_beams=...)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from genserve.completion import TokenLogprob
from genserve.sampling.logits_array import FloatArray
from genserve.sampling.sampler import best_ids
from genserve.sampling.sampler_chain import NUMPY_OPS

EarlyStopping: TypeAlias = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRules:
    """Parameters of a search."""

    width: int                          # beams that continue, and hypotheses that are kept
    length_penalty: float               # a score is divided by the number of tokens to this power
    early_stopping: EarlyStopping
    max_new_tokens: int                 # a hypothesis of this length is complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One more token after one of the beams."""

    beam: int                           # index of the row that it continues
    token_id: int
    score: float                        # sum of the log-probabilities of its tokens, this one included


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A complete answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # before any logits processor; empty if not asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredHypothesis:
    """A hypothesis, and the score by which hypotheses are compared."""

    hypothesis: Hypothesis
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamState:
    """The state of a search after a step.

    Attributes:
        live: the beams that continue, the best first; at most the width.
        finished: the best hypotheses so far, the best first; at most the width.
        done: no beam needs to continue.
    """

    live: tuple[Candidate, ...] = ()
    finished: tuple[ScoredHypothesis, ...] = ()
    done: bool = False


def log_softmax(logits: FloatArray) -> FloatArray:
    """Return the natural logarithms of the probabilities of each row: [R, V] float32, a new array.

    A row with a NaN or +inf, or without a finite number, becomes NaN.
    """
    with np.errstate(invalid="ignore"):
        log_probs: FloatArray = logits - logits.max(axis=1, keepdims=True)
        for row in log_probs:
            row -= np.float32(np.log(NUMPY_OPS.exponentials(row).sum(dtype=np.float64)))
    return log_probs


def best_candidates(log_probs: FloatArray, *, scores: Sequence[float], count: int) -> list[Candidate]:
    """Return the best `count` candidates, or all possible ones if there are fewer, the best first.

    Args:
        log_probs: [R, V] float32, the log-probabilities of the token after each of R beams; -inf: impossible.
        scores: the scores of the R beams; -inf: a spare beam, which gets no candidates.
        count: at least 1.
    """
    found = [
        Candidate(beam=beam, token_id=token_id, score=float(row[token_id] + np.float32(score)))
        for beam, (row, score) in enumerate(zip(log_probs, scores, strict=True))
        if score > -math.inf
        for token_id in best_ids(row, count).tolist()
    ]
    return sorted(found, key=lambda c: (-c.score, c.beam, c.token_id))[:count]


def advance(
    state: BeamState,
    candidates: Sequence[Candidate],
    *,
    complete: Callable[[Candidate], Hypothesis | None],
    num_tokens: int,
    rules: BeamRules,
) -> BeamState:
    """Return the state one token later.

    Args:
        state: the state before the token.
        candidates: the candidates, the best first; enough that `rules.width` do not end, if so many exist.
        complete: returns the hypothesis that a candidate's token completes; None: the beam continues.
        num_tokens: length of the candidates' answers, this token included.
        rules: the parameters of the search.

    Source: `GenerationMixin._beam_search` of transformers 5; with `length_penalty` as in Wu et al., "Google's
    Neural Machine Translation System" (2016), without the 5 that they add to the length.
    """
    completed = [(candidate, complete(candidate)) for candidate in candidates]
    live = [candidate for candidate, hypothesis in completed if hypothesis is None][: rules.width]
    length: float = num_tokens**rules.length_penalty
    # Only the best `width` may end: the rest are candidates in case some of the best end.
    new = [
        ScoredHypothesis(hypothesis=hypothesis, score=candidate.score / length)
        for candidate, hypothesis in completed[: rules.width]
        if hypothesis is not None
    ]
    finished = sorted([*state.finished, *new], key=lambda f: -f.score)[: rules.width]
    is_full = len(finished) == rules.width
    done = not live or (is_full and not _can_improve(live[0].score, finished[-1].score, num_tokens, rules))
    return BeamState(live=tuple(live), finished=tuple(finished), done=done)


def _can_improve(best_live: float, worst_finished: float, num_tokens: int, rules: BeamRules) -> bool:
    """Whether a live beam may still become better than the worst of the kept hypotheses.

    With `early_stopping` false it is judged as if it ended now, which is a heuristic where longer answers
    have an advantage; "never" assumes the longest answer.
    """
    if rules.early_stopping is True:
        return False
    longest = rules.early_stopping == "never" and rules.length_penalty > 0
    length = float(rules.max_new_tokens if longest else num_tokens)
    return bool(best_live / length**rules.length_penalty > worst_finished)
