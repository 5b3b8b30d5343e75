"""Model runner: builds the arrays of a scheduled forward, and runs the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genserve.engine.engine_request import BlockTable
from genserve.engine.kv_cache_manager import KVCacheManager
from genserve.engine.logits_model import ForwardBatch, LogitsModel
from genserve.engine.scheduler import SchedulerOutput
from genserve.sampling.logits_array import LogitsArray, TokenArray


class ModelRunner:
    """Runs steps with arrays that are allocated once. Belongs to the engine's thread.

    A row of the block table is only written if its request or its blocks have changed since the last step.
    """

    def __init__(
        self, model: LogitsModel, kv_cache_manager: KVCacheManager, *, max_num_batched_tokens: int
    ) -> None:
        """Allocate the arrays."""
        self._model = model
        self._kv = kv_cache_manager
        num_seqs = model.max_num_seqs
        self._token_ids = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._positions = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._starts = np.zeros(num_seqs + 1, dtype=np.int32)
        self._num_computed = np.zeros(num_seqs, dtype=np.int32)
        self._block_table = np.zeros((num_seqs, -(-model.max_length // model.block_size)), dtype=np.int32)
        self._state_source = np.zeros(num_seqs, dtype=np.int32) if kv_cache_manager.has_states else None
        self._state_target = np.zeros(num_seqs, dtype=np.int32) if kv_cache_manager.has_states else None
        self._counting = np.arange(max_num_batched_tokens + 1, dtype=np.int64)
        # The table that was written into each row of the block table, and its `num_rewrites` and length then.
        self._tables: list[BlockTable | None] = [None] * num_seqs
        self._written = [(0, 0)] * num_seqs

    def run(self, output: SchedulerOutput) -> tuple[LogitsArray, Sequence[int]]:
        """Run a step.

        Returns:
            The logits, and how many of their rows each request has, in the order of the requests.
        """
        if self._kv.copies:
            self._model.copy_blocks(self._kv.copies)
            self._kv.copies.clear()
        num_seqs = len(output.requests)
        self._write_block_table(output)
        self._num_computed[:num_seqs] = [request.num_computed_tokens for request in output.requests]
        if self._state_source is not None and self._state_target is not None:
            states = [state for r in output.requests if (state := r.block_table.state) is not None]
            self._state_source[:num_seqs] = [state.slot for state in states]
            self._state_target[:num_seqs] = [state.target for state in states]
        if num_seqs == output.num_decodes and not output.num_drafted and not output.num_replayed:
            return self._model.forward(self._decodes(output)), (1,) * num_seqs
        batch, num_rows = self._mixed(output)
        return self._model.forward(batch), num_rows

    def _write_block_table(self, output: SchedulerOutput) -> None:
        for row, request in enumerate(output.requests):
            table = request.block_table
            num_rewrites, num_blocks = self._written[row]
            if self._tables[row] is not table or num_rewrites != table.num_rewrites:
                self._tables[row], num_blocks = table, 0
            elif num_blocks == len(table.block_ids):
                continue
            self._block_table[row, num_blocks : len(table.block_ids)] = table.block_ids[num_blocks:]
            self._written[row] = (table.num_rewrites, len(table.block_ids))

    def _decodes(self, output: SchedulerOutput) -> ForwardBatch:
        """Return the batch of a step in which each request has one token."""
        num_seqs = len(output.requests)
        self._token_ids[:num_seqs] = [request.token_ids[-1] for request in output.requests]
        self._positions[:num_seqs] = self._num_computed[:num_seqs]
        self._starts[: num_seqs + 1] = self._counting[: num_seqs + 1]
        return self._batch(output, num_seqs, self._counting[:num_seqs])

    def _mixed(self, output: SchedulerOutput) -> tuple[ForwardBatch, list[int]]:
        """Return the batch of any other step, and how many rows of logits each request gets."""
        token_ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        rows: list[int] = []
        num_rows: list[int] = []
        steps = zip(output.requests, output.num_tokens, output.drafts, strict=True)
        for request, num_tokens, draft in steps:
            first = request.num_computed_tokens
            token_ids += request.token_ids[first : first + num_tokens]
            token_ids += draft
            end = first + num_tokens + len(draft)
            positions += range(first, end)
            wanted = range(max(first, request.logits_start), end)
            rows += range(len(token_ids) - len(wanted), len(token_ids))
            num_rows.append(len(wanted))
            starts.append(len(token_ids))
        num_seqs, num_tokens = len(num_rows), len(token_ids)
        self._token_ids[:num_tokens] = token_ids
        self._positions[:num_tokens] = positions
        self._starts[: num_seqs + 1] = starts
        return self._batch(output, num_tokens, np.array(rows, dtype=np.int64)), num_rows

    def _batch(self, output: SchedulerOutput, num_tokens: int, logits_indices: TokenArray) -> ForwardBatch:
        num_seqs = len(output.requests)
        adapters = [request.adapter for request in output.requests]
        return ForwardBatch(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            query_start_loc=self._starts[: num_seqs + 1],
            num_computed_tokens=self._num_computed[:num_seqs],
            block_table=self._block_table[:num_seqs],
            logits_indices=logits_indices,
            state_source=None if self._state_source is None else self._state_source[:num_seqs],
            state_target=None if self._state_target is None else self._state_target[:num_seqs],
            adapters=adapters if any(adapters) else None,
        )
