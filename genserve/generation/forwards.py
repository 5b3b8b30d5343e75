"""Forwards: the runs of the model, each over what a plan chooses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genserve.generation.logits_model import LogitsArray, LogitsModel, TokenArray
from genserve.generation.planner import Decode, Prefill, StepPlan, Verify
from genserve.generation.residents import Occupant
from genserve.generation.slots import Slots
from genserve.generation.speculation import Verifier

__all__ = ["Forwards", "note_computed"]


class Forwards:
    """Runs plans over the slots of one model. Belongs to the engine's thread."""

    def __init__(self, model: LogitsModel, slots: Slots, *, verifier: Verifier | None) -> None:
        """Take `verifier` for plans of several tokens where something is cached; None: there are none."""
        self._model = model
        self._slots = slots
        self._verifier = verifier

    def run(self, plan: StepPlan) -> tuple[LogitsArray, Sequence[int]]:
        """Run a plan; returns the logits, and the row behind the first token, or chunk, of each sequence."""
        slots = self._slots.of(plan.sequences)
        match plan:
            case Prefill():
                return self._prefill(plan, slots), range(len(slots))
            case Decode():
                return self._decode(plan.sequences, slots), slots
            case Verify():
                return self._verify(plan, slots), [slot * plan.width for slot in slots]

    def _prefill(self, plan: Prefill, slots: Sequence[int]) -> LogitsArray:
        past = plan.sequences[0].num_computed
        chunks = [
            s.token_ids[past : past + n] for s, n in zip(plan.sequences, plan.num_tokens, strict=True)
        ]
        return self._model.prefill(chunks, first_slot=slots[0], past=past)

    def _decode(self, sequences: Sequence[Occupant], slots: Sequence[int]) -> LogitsArray:
        """Run one token of each sequence; a slot between them that has none gets an idle row.

        An idle row writes behind what its slot holds, where the next tokens overwrite it.
        """
        past_lengths = self._past_lengths(slots)
        token_ids = np.zeros(len(past_lengths), dtype=np.int64)
        token_ids[slots] = [s.token_ids[s.num_computed] for s in sequences]
        return self._model.decode(token_ids, past_lengths)

    def _verify(self, plan: Verify, slots: Sequence[int]) -> LogitsArray:
        """Run several tokens of each sequence; padding is written where the next tokens overwrite it."""
        assert self._verifier is not None
        past_lengths = self._past_lengths(slots)
        token_ids = np.zeros((len(past_lengths), plan.width), dtype=np.int64)
        for slot, tokens in zip(slots, plan.tokens, strict=True):
            token_ids[slot, : len(tokens)] = tokens
        return self._verifier.verify(token_ids, past_lengths)

    def _past_lengths(self, slots: Sequence[int]) -> TokenArray:
        residents = self._slots.residents[: max(slots) + 1]
        return np.array([r.num_computed if r else 0 for r in residents], dtype=np.int64)


def note_computed(plan: StepPlan) -> None:
    """Count what a plan has run as computed; of a verification what is known to be right, one token each."""
    counts = plan.num_tokens if isinstance(plan, Prefill) else (1,) * len(plan.sequences)
    for sequence, count in zip(plan.sequences, counts, strict=True):
        if isinstance(plan, Prefill) and sequence.num_prefilled == sequence.num_computed:
            sequence.num_prefilled += count
        sequence.num_computed += count
