"""Logits model: the interface of a model to the engine, a forward over sequences in a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from genserve.errors import GenserveError
from genserve.sampling.logits_array import LogitsArray, TokenArray

IndexArray = NDArray[np.int32]


class LogitsAdapter(Protocol):
    """Changes the weights of a logits model for some sequences of a forward."""

    @property
    def sha256(self) -> str:
        """The digest of its files; other weights have another one."""

    @property
    def is_ready(self) -> bool:
        """Whether its weights are in memory; its sequences wait until they are."""

    @property
    def error(self) -> GenserveError | None:
        """Why its weights will never be in memory; None: they are, or will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """The tokens of one forward: T tokens of B sequences, grouped by sequence and in order.

    A sequence has one or more tokens after any number of computed ones. Prompts, chunks of prompts, decodes
    and decodes with drafted tokens differ in nothing else. The arrays are C-contiguous; they belong to the
    caller, who may overwrite them after the forward.
    """

    token_ids: TokenArray               # [T]
    positions: TokenArray               # [T], of each token in its sequence
    query_start_loc: IndexArray         # [B + 1]: sequence b has tokens query_start_loc[b] to [b + 1] - 1
    num_computed_tokens: IndexArray     # [B]: how many tokens of each are in the KV cache already
    block_table: IndexArray             # [B, max_blocks]: block ids in order; undefined after the last
    logits_indices: TokenArray          # [R]: the tokens after which logits are needed, ascending
    # None unless the model has recurrent states. It reads the slot of the state before a sequence's
    # tokens, and writes the state after all of them, drafted ones too, to the target. No target is another
    # sequence's source or target.
    state_source: IndexArray | None = None      # [B]: slots; -1: the state before the first token, zero
    state_target: IndexArray | None = None      # [B]: slots; may be the source
    # [B]: the adapter of each sequence, None: it has none. None: no sequence has one.
    adapters: Sequence[LogitsAdapter | None] | None = None

    @classmethod
    def of(
        cls,
        token_ids: Sequence[Sequence[int] | TokenArray] | TokenArray,
        *,
        num_computed_tokens: ArrayLike,
        block_table: ArrayLike,
        logits_indices: ArrayLike | None = None,
        state_source: ArrayLike | None = None,
        state_target: ArrayLike | None = None,
    ) -> Self:
        """Return the forward of the next tokens of some sequences.

        Args:
            token_ids: the tokens of B sequences, at least one each.
            num_computed_tokens: [B].
            block_table: [B, max_blocks].
            logits_indices: [R]; None: the last token of each.
            state_source: [B]; None: the model has no states.
            state_target: [B]; None: the model has no states.
        """
        counts = [len(tokens) for tokens in token_ids]
        starts = np.cumsum([0, *counts])
        computed = np.asarray(num_computed_tokens, dtype=np.int32)
        wanted = starts[1:] - 1 if logits_indices is None else logits_indices
        return cls(
            token_ids=np.concatenate(token_ids, dtype=np.int64),
            positions=np.arange(starts[-1]) + np.repeat(computed - starts[:-1], counts),
            query_start_loc=starts.astype(np.int32),
            num_computed_tokens=computed,
            block_table=np.asarray(block_table, dtype=np.int32),
            logits_indices=np.asarray(wanted, dtype=np.int64),
            state_source=None if state_source is None else np.asarray(state_source, dtype=np.int32),
            state_target=None if state_target is None else np.asarray(state_target, dtype=np.int32),
        )


class LogitsSizes(Protocol):
    """How much a logits model can hold and compute."""

    @property
    def max_num_seqs(self) -> int:
        """The most sequences in one forward."""

    @property
    def max_length(self) -> int:
        """The most tokens of one sequence, prompt and answer together."""

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""

    @property
    def block_size(self) -> int:
        """Tokens of a block of the KV cache."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache; at least as many as a sequence of `max_length` tokens needs."""


class LogitsModel(LogitsSizes, Protocol):
    """A model with a KV cache of `num_blocks` blocks of `block_size` tokens. One thread calls all of it."""

    @property
    def num_state_slots(self) -> int:
        """Slots for recurrent states; 0: the model has none.

        A slot holds the state of all layers after the tokens of one sequence. There are at least two for each
        of `max_num_seqs`, since a sequence may keep its state while it writes the next one; what is more
        holds the states of cached prefixes.
        """

    def forward(self, batch: ForwardBatch) -> LogitsArray:
        """Run the tokens, and write their keys and values into the blocks of their sequences.

        Returns:
            [R, vocab_size] float32: the logits after the tokens of `logits_indices`; a view of a buffer that
            the next forward overwrites.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the keys and values of whole blocks, for each pair (source, target), in this order."""
