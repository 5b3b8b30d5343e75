"""Batch sampler: the next token of every sequence of a step, in one pass over their rows of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from genserve.completion import TokenLogprob
from genserve.generation.engine_request import TokenSequence
from genserve.sampling.logits_edits import LogitsEdits, grammar_bitmask, join_edits
from genserve.sampling.sampler import Asked, SamplerOutput, SamplingMetadata
from genserve.sampling.staged_sampler import COLDEST

__all__ = ["Pick", "RowPicker", "pick"]


class Pick(NamedTuple):
    """What was picked for one row."""

    token_id: int
    logprob: TokenLogprob | None    # None if the request does not ask for it
    finite: bool                    # False: a NaN, or the rules leave no finite logit; the token is void
    surprise_bits: float | None     # of the token among those it was drawn from, if its stages learn


class RowPicker(Protocol):
    """Picks where the logits lie: `sampler.sample_rows` on the host, its twin of torch on a device."""

    def __call__(
        self,
        logits: Any,
        *,
        drawing: Sequence[int],
        rules: SamplingMetadata,
        asking: Sequence[Asked],
        edits: LogitsEdits | None,
    ) -> SamplerOutput:
        """See `sampler.sample_rows`."""


def pick(logits: Any, sequences: Sequence[TokenSequence], *, picker: RowPicker) -> list[Pick]:
    """Pick one token per row by the parameters of its sequence.

    Args:
        logits: [R, V] float32, of the kind that `picker` takes; overwritten by logit rules.
        sequences: R of them.
        picker: does it.
    """
    if all(s.picks_plainly for s in sequences):
        drawing = [i for i, s in enumerate(sequences) if s.params.temperature > COLDEST]
        rules = _rules([sequences[i] for i in drawing]) if drawing else _NO_DRAWS
        picked = picker(logits, drawing=drawing, rules=rules, asking=(), edits=None)
        return [
            Pick(token_id, None, finite, None)
            for token_id, finite in zip(picked.token_ids.tolist(), picked.finite.tolist(), strict=True)
        ]
    edits = _edits(sequences, num_tokens=logits.shape[1])
    forced = edits.masks.forced if edits is not None and edits.masks is not None else ()
    drawing = [i for i, s in enumerate(sequences) if s.params.temperature > COLDEST and i not in forced]
    learning = [i for i in drawing if (stages := sequences[i].stages) is not None and stages.learns]
    told = [_asked(i, s) for i, s in enumerate(sequences) if s.params.logprobs]
    asking = [*told, *(Asked(row=i, processed=True) for i in learning)]
    rules = _rules([sequences[i] for i in drawing])
    picked = picker(logits, drawing=drawing, rules=rules, asking=asking, edits=edits)
    logprobs = {asked.row: found for asked, found in zip(told, picked.logprobs, strict=False)}
    learned = {i: _bits(found) for i, found in zip(learning, picked.logprobs[len(told) :], strict=True)}
    return [
        Pick(token_id=token_id, logprob=logprobs.get(row), finite=finite, surprise_bits=learned.get(row))
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


def _bits(found: TokenLogprob) -> float:
    return -(found.logprob or 0.0) / math.log(2)


def _edits(sequences: Sequence[TokenSequence], *, num_tokens: int) -> LogitsEdits | None:
    masks = grammar_bitmask([s.grammar for s in sequences], num_tokens=num_tokens)
    edits = [s.logit_rules.edits(s.token_ids, row=row) for row, s in enumerate(sequences) if s.logit_rules]
    return join_edits(edits, masks=masks) if edits or masks is not None else None


def _rules(sequences: Sequence[TokenSequence]) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=np.array([s.params.temperature for s in sequences], dtype=np.float32),
        truncations=tuple(s.truncation for s in sequences),
        stages=tuple(s.stages for s in sequences),
        seed=np.array([s.seed for s in sequences], dtype=np.uint64),
        step=np.array([s.num_new_tokens for s in sequences], dtype=np.uint64),
    )


_NO_DRAWS = _rules(())
