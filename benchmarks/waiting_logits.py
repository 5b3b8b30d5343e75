"""Waiting logits: a logits model that computes nothing, but takes as long as a measured model's steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from genserve.engine.logits_model import ForwardBatch
from genserve.sampling.logits_array import FloatArray
from genserve.textmodel.logits_config import LengthLimit

__all__ = ["SMOLLM2", "StepCost", "WaitingLogits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """How long a step takes."""

    step_s: float           # the base time of a step
    token_s: float          # added for each token of the step
    attended_s: float       # added for each token to which a token of the step attends

    def seconds(self, batch: ForwardBatch) -> float:
        """Return the time of a forward."""
        num_attended = int(batch.positions.sum()) + len(batch.positions)
        return self.step_s + self.token_s * len(batch.token_ids) + self.attended_s * num_attended


# A fit to the steps of SmolLM2-135M in int8 on two cores, which docs/measuring.md lists: 6.0 ms for 1 x 64
# (rows x context), 17.3 for 32 x 64, 23.5 for 32 x 256, 37.5 for 32 x 768, and 262 for a prefill of 600.
SMOLLM2 = StepCost(step_s=0.0055, token_s=0.00031, attended_s=0.0000007)


class WaitingLogits:
    """Implements `LoadedLogits`: waits, then returns logits that prefer another token after each position.

    The wait is a sleep, so any number of models run on one core as if each had a machine of its own.
    """

    kv_cache_bytes = 1
    metadata: Mapping[str, str] = {}

    def __init__(
        self,
        cost: StepCost,
        *,
        max_num_seqs: int = 32,
        max_length: int = 4096,
        block_size: int = 16,
        num_blocks: int,
        token_ids: Sequence[int] = range(256),
        vocab_size: int = 320,
    ) -> None:
        """Start with an empty cache; the logits prefer one of `token_ids`."""
        self.max_num_seqs = max_num_seqs
        self.max_length = self.context_length = max_length
        self.length_limit = LengthLimit.MODEL
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_state_slots = 0
        self.vocab_size = vocab_size
        self._cost = cost
        self._rows: FloatArray = np.zeros((len(token_ids), vocab_size), dtype=np.float32)
        self._rows[range(len(token_ids)), list(token_ids)] = 1.0

    def forward(self, batch: ForwardBatch) -> FloatArray:
        end_s = time.monotonic() + self._cost.seconds(batch)
        rows = self._rows[batch.positions[batch.logits_indices] % len(self._rows)]
        time.sleep(max(0.0, end_s - time.monotonic()))
        return rows

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do nothing, because the blocks are empty."""

    def close(self) -> None:
        """Do nothing, since there is nothing to free."""
