"""Beam rules: which answers are the likeliest, token by token; pure.

The rules, and the order in which they are applied, are those of `transformers.generate(num_beams=...)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from genserve.completion import TokenLogprob
from genserve.generation.logits_model import FloatArray
from genserve.sampling.sampler import best_ids
from genserve.sampling.staged_sampler import NUMPY_OPS, exponentials

__all__ = [
    "BeamRules",
    "Candidate",
    "EarlyStopping",
    "Finished",
    "Hypothesis",
    "Standings",
    "advance",
    "best",
    "log_softmax",
]

EarlyStopping: TypeAlias = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRules:
    """What a search looks for."""

    width: int                          # beams that go on, and answers that are kept
    length_penalty: float               # a score is divided by the number of tokens to the power of this
    early_stopping: EarlyStopping
    max_new_tokens: int                 # an answer of so many is complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One more token behind one of the beams."""

    beam: int                           # index of the row that it goes on from
    token_id: int
    score: float                        # sum of the log-probabilities of its tokens, this one included


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """An answer that is complete."""

    token_ids: tuple[int, ...]
    likelihoods: tuple[TokenLogprob, ...]   # of its tokens, before any rule; empty if not asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A hypothesis and the score by which it is compared with others."""

    hypothesis: Hypothesis
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Standings:
    """The state behind one step.

    Attributes:
        live: the beams that go on, the best first; not more than the width.
        finished: the best complete answers so far, the best first; not more than the width.
        done: no beam needs to go on.
    """

    live: tuple[Candidate, ...] = ()
    finished: tuple[Finished, ...] = ()
    done: bool = False


def log_softmax(logits: FloatArray) -> FloatArray:
    """Return the natural logs of the probabilities of each row: [R, V] float32, a new array.

    A row with a NaN or +inf, or with no finite number, becomes NaN.
    """
    with np.errstate(invalid="ignore"):
        levels: FloatArray = logits - logits.max(axis=1, keepdims=True)
        for row in levels:
            row -= np.float32(np.log(exponentials(row, NUMPY_OPS).sum(dtype=np.float64)))
    return levels


def best(log_probs: FloatArray, *, scores: Sequence[float], count: int) -> list[Candidate]:
    """Return the best `count` candidates, or all that are possible, the best first.

    Args:
        log_probs: [R, V] float32, of the token behind each of R beams; -inf: not possible.
        scores: of these beams, R of them; -inf: it is a spare one, behind which nothing is looked for.
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
    standings: Standings,
    candidates: Sequence[Candidate],
    *,
    complete: Callable[[Candidate], Hypothesis | None],
    num_tokens: int,
    rules: BeamRules,
) -> Standings:
    """Return the state one token later.

    Args:
        standings: the state.
        candidates: the best first; so many that `rules.width` do not end, if there are so many at all.
        complete: returns the answer that a candidate's token completes; None: it goes on.
        num_tokens: of the answers, the candidate's token included.
        rules: of the search.

    Source: `GenerationMixin._beam_search` of transformers 5; with `length_penalty` as in Wu et al., "Google's
    Neural Machine Translation System" (2016), without the 5 that these add to the length.
    """
    answers = [(candidate, complete(candidate)) for candidate in candidates]
    live = [candidate for candidate, answer in answers if answer is None][: rules.width]
    length: float = num_tokens**rules.length_penalty
    # One that ends counts only if it is among the best: a worse one was looked at as a substitute.
    new = [
        Finished(hypothesis=answer, score=candidate.score / length)
        for candidate, answer in answers[: rules.width]
        if answer is not None
    ]
    finished = sorted([*standings.finished, *new], key=lambda f: -f.score)[: rules.width]
    is_full = len(finished) == rules.width
    done = not live or (is_full and not _may_improve(live[0].score, finished[-1].score, num_tokens, rules))
    return Standings(live=tuple(live), finished=tuple(finished), done=done)


def _may_improve(best_live: float, worst_finished: float, num_tokens: int, rules: BeamRules) -> bool:
    """Whether a live beam may still become better than the worst of as many answers as are kept.

    With `early_stopping` false it is judged as if it ended now, which is a guess where longer answers
    have an advantage; "never" waits for the longest.
    """
    if rules.early_stopping is True:
        return False
    longest = rules.early_stopping == "never" and rules.length_penalty > 0
    length = float(rules.max_new_tokens if longest else num_tokens)
    return bool(best_live / length**rules.length_penalty > worst_finished)
