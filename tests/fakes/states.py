"""A logits model with recurrent states: a state is a digest of all tokens, so a wrong one is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.engine.logits_model import ForwardBatch
from genserve.sampling.logits_array import FloatArray
from tests.fakes.logits import PagedLogits, digest_after

_UNWRITTEN = -1


class RecurrentLogits(PagedLogits):
    """Implements `LogitsModel` and `BlockMemory`; a slot holds the digest of the tokens of its sequence.

    A forward whose sources are not the states of its sequences raises, and one that fails spoils its targets.
    """

    def __init__(self, *, num_state_slots: int | None = None, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.num_state_slots = num_state_slots or 4 * self.max_num_seqs
        self.states = np.full(self.num_state_slots, _UNWRITTEN, dtype=np.int64)

    def forward(self, batch: ForwardBatch) -> FloatArray:
        assert batch.state_source is not None
        assert batch.state_target is not None
        assert batch.state_source.dtype == batch.state_target.dtype == np.int32
        sources, targets = batch.state_source.tolist(), batch.state_target.tolist()
        assert len(sources) == len(targets) == len(batch.num_computed_tokens)
        assert len(set(targets)) == len(targets), "two sequences have the same target"
        for row, target in enumerate(targets):
            assert target not in sources[:row] + sources[row + 1 :], "a target is another one's source"
        digests = [0 if source == -1 else int(self.states[source]) for source in sources]
        self.states[targets] = _UNWRITTEN
        rows = super().forward(batch)
        for row, (start, end) in enumerate(pairwise(batch.query_start_loc.tolist())):
            num_computed = int(batch.num_computed_tokens[row])
            places = (self._place(batch, row, position) for position in range(num_computed))
            before = reduce(digest_after, (int(self._tokens[place]) for place in places), 0)
            assert digests[row] == before, "a state is behind other tokens"
            self.states[targets[row]] = reduce(digest_after, batch.token_ids[start:end].tolist(), before)
        return rows

    def read_states(self, slots: Sequence[int], rows: NDArray[np.uint8]) -> None:
        rows[:] = self.states[slots][:, np.newaxis].view(np.uint8)

    def write_states(self, slots: Sequence[int], rows: NDArray[np.uint8]) -> None:
        self.states[slots] = rows.view(np.int64)[:, 0]
