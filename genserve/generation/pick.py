"""Pick: the next token of every token sequence that samples, in one pass over their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from genserve.generation.likelihood import Asked
from genserve.generation.logit_edits import LogitEdits, join_edits
from genserve.generation.sampler import PickedRows, SamplingRows
from genserve.generation.token_sequence import TokenSequence
from genserve.request import TokenLogprob

__all__ = ["Pick", "RowPicker", "pick"]

# At this temperature and below a draw is greedy: no two float32 logits are nearer than this divides.
COLDEST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """What was picked for one row."""

    token_id: int
    logprob: TokenLogprob | None    # None if the request does not ask for it
    finite: bool                    # False: a NaN, or the rules leave no finite logit; the token is void


class RowPicker(Protocol):
    """Picks where the logits lie: `sampler.pick_rows` on the host, its twin of torch on a device."""

    def __call__(
        self,
        logits: Any,
        *,
        drawing: Sequence[int],
        rules: SamplingRows,
        asking: Sequence[Asked],
        edits: LogitEdits | None,
    ) -> PickedRows:
        """See `sampler.pick_rows`."""


def pick(logits: Any, sequences: Sequence[TokenSequence], *, picker: RowPicker) -> list[Pick]:
    """Pick one token per row by the parameters of its sequence.

    Args:
        logits: [R, V] float32, of the kind that `picker` takes; overwritten by logit rules.
        sequences: R of them.
        picker: does it.
    """
    drawing = [i for i, s in enumerate(sequences) if s.params.temperature > COLDEST]
    asking = [_asked(i, s) for i, s in enumerate(sequences) if s.params.logprobs]
    rules = _rules([sequences[i] for i in drawing])
    picked = picker(logits, drawing=drawing, rules=rules, asking=asking, edits=_edits(sequences))
    logprobs = {asked.row: found for asked, found in zip(asking, picked.logprobs, strict=True)}
    return [
        Pick(token_id=token_id, logprob=logprobs.get(row), finite=finite)
        for row, (token_id, finite) in enumerate(
            zip(picked.token_ids.tolist(), picked.finite.tolist(), strict=True)
        )
    ]


def _asked(row: int, sequence: TokenSequence) -> Asked:
    params = sequence.params
    return Asked(
        row=row,
        num_top=params.top_logprobs,
        named=params.logprob_token_ids,
        processed=params.logprobs_mode == "processed",
    )


def _edits(sequences: Sequence[TokenSequence]) -> LogitEdits | None:
    edits = [s.logit_rules.edits(s.token_ids, row=row) for row, s in enumerate(sequences) if s.logit_rules]
    return join_edits(edits) if edits else None


def _rules(sequences: Sequence[TokenSequence]) -> SamplingRows:
    return SamplingRows(
        temperature=np.array([s.params.temperature for s in sequences], dtype=np.float32),
        top_k=np.array([s.params.top_k for s in sequences], dtype=np.int64),
        top_p=np.array([s.params.top_p for s in sequences], dtype=np.float32),
        min_p=np.array([s.params.min_p for s in sequences], dtype=np.float32),
        typical_p=np.array([s.params.typical_p for s in sequences], dtype=np.float32),
        epsilon_cutoff=np.array([s.params.epsilon_cutoff for s in sequences], dtype=np.float32),
        eta_cutoff=np.array([s.params.eta_cutoff for s in sequences], dtype=np.float32),
        top_n_sigma=np.array([s.params.top_n_sigma for s in sequences], dtype=np.float32),
        seed=np.array([s.seed for s in sequences], dtype=np.uint64),
        step=np.array([s.num_new_tokens for s in sequences], dtype=np.uint64),
    )
