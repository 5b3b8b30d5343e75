"""Pick: the next token of every token sequence that samples, in one pass over their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from genserve.generation.logits_model import FloatArray, TokenArray
from genserve.generation.sampler import SamplingRows, greedy, log_probabilities, sample, select_rows
from genserve.generation.token_sequence import TokenSequence

__all__ = ["Pick", "pick"]

# At this temperature and below a draw is greedy: no two float32 logits are nearer than this divides.
COLDEST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """What was picked for one row."""

    token_id: int
    logprob: float | None       # natural log; None if the request does not ask for it
    finite: bool                # False: the row holds a NaN or has no finite maximum, the token is void


def pick(logits: FloatArray, sequences: Sequence[TokenSequence]) -> list[Pick]:
    """Pick one token per row by the parameters of its sequence.

    Args:
        logits: [R, V] float32; not modified.
        sequences: R of them.
    """
    # The maximum of a row with a NaN is NaN, and argmax points at it: one look tells.
    best = greedy(logits)
    finite = np.isfinite(logits[np.arange(len(best)), best])
    token_ids = _draw(logits, sequences, best=best, finite=finite)
    logprobs = _logprobs(logits, token_ids, sequences)
    return [
        Pick(token_id=token_id, logprob=logprobs.get(row), finite=ok)
        for row, (token_id, ok) in enumerate(zip(token_ids.tolist(), finite.tolist(), strict=True))
    ]


def _draw(
    logits: FloatArray, sequences: Sequence[TokenSequence], *, best: TokenArray, finite: np.ndarray
) -> TokenArray:
    drawing = [i for i, s in enumerate(sequences) if s.params.temperature > COLDEST and finite[i]]
    if not drawing:
        return best
    rows = SamplingRows(
        temperature=np.array([sequences[i].params.temperature for i in drawing], dtype=np.float32),
        top_k=np.array([sequences[i].params.top_k for i in drawing], dtype=np.int64),
        top_p=np.array([sequences[i].params.top_p for i in drawing], dtype=np.float32),
        seed=np.array([sequences[i].seed for i in drawing], dtype=np.uint64),
        step=np.array([sequences[i].num_new_tokens for i in drawing], dtype=np.uint64),
    )
    token_ids = best.copy()
    token_ids[drawing] = sample(select_rows(logits, drawing), rows)
    return token_ids


def _logprobs(
    logits: FloatArray, token_ids: TokenArray, sequences: Sequence[TokenSequence]
) -> dict[int, float]:
    """Return the log-probability of the picked token for the rows that ask for it, by row."""
    asking = [i for i, s in enumerate(sequences) if s.params.logprobs]
    if not asking:
        return {}
    values = log_probabilities(select_rows(logits, asking), token_ids[asking])
    return dict(zip(asking, values.tolist(), strict=True))
