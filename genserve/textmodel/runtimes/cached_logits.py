"""Cached logits: the base class of the runtimes with a KV cache, and operations on packed tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Required, TypedDict

import numpy as np
from numpy.typing import NDArray

from genserve.engine.logits_model import ForwardBatch, IndexArray
from genserve.errors import RepositoryError
from genserve.sampling.logits_array import TokenArray
from genserve.textmodel.logits_config import LengthLimit
from genserve.textmodel.runtimes.kv_cache_memory import (
    KVCache,
    LogitsMemory,
    StateShapes,
    TokenShapes,
    slot_bytes,
    token_bytes,
)

logger = logging.getLogger(__name__)

# The remedy for a file of `genserve export` that this version does not run.
EXPORT_AGAIN = "export it again with `genserve export --overwrite`"

_MAX_LOGITS_BYTES = 2**28   # the most in a run that computes logits for every position

_Indices = NDArray[np.integer[Any]]


def part_of(batch: ForwardBatch, sequences: _Indices) -> tuple[ForwardBatch, _Indices]:
    """Return the part of a batch that has only the given sequences, by ascending index.

    Returns:
        The part, and the rows of the whole batch's logits that belong to it.
    """
    tokens = np.flatnonzero(np.isin(sequence_of_tokens(batch), sequences))
    rows = np.flatnonzero(np.isin(batch.logits_indices, tokens))
    counts = np.diff(batch.query_start_loc)[sequences]
    part = ForwardBatch(
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        query_start_loc=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        num_computed_tokens=batch.num_computed_tokens[sequences],
        block_table=batch.block_table[sequences],
        state_source=None if batch.state_source is None else batch.state_source[sequences],
        state_target=None if batch.state_target is None else batch.state_target[sequences],
        logits_indices=np.searchsorted(tokens, batch.logits_indices[rows]),
        adapters=None if batch.adapters is None else [batch.adapters[index] for index in sequences],
    )
    return part, rows


def tokens_of(batch: ForwardBatch, start: int, stop: int) -> tuple[ForwardBatch, slice]:
    """Return the part of a batch that has the tokens from `start` up to `stop`, which may divide sequences.

    A divided sequence has its first tokens in an earlier part, which must run before.

    Returns:
        The part, and the rows of the whole batch's logits that belong to it.
    """
    starts = batch.query_start_loc
    first = int(np.searchsorted(starts, start, side="right")) - 1
    last = int(np.searchsorted(starts, stop))
    num_computed = batch.num_computed_tokens[first:last].copy()
    num_computed[0] += start - starts[first]
    rows = slice(*np.searchsorted(batch.logits_indices, [start, stop]).tolist())
    source, target = batch.state_source, batch.state_target
    if source is not None and target is not None:
        source, target = source[first:last].copy(), target[first:last]
        if start > starts[first]:   # the earlier part has left the state of the divided sequence there
            source[0] = target[0]
    part = ForwardBatch(
        token_ids=batch.token_ids[start:stop],
        positions=batch.positions[start:stop],
        query_start_loc=np.clip(starts[first : last + 1], start, stop) - np.int32(start),
        num_computed_tokens=num_computed,
        block_table=batch.block_table[first:last],
        logits_indices=batch.logits_indices[rows] - start,
        state_source=source,
        state_target=target,
        adapters=None if batch.adapters is None else batch.adapters[first:last],
    )
    return part, rows


def sequence_of_tokens(batch: ForwardBatch) -> TokenArray:
    """Return the index of the sequence of each token of a batch: [T]."""
    return np.repeat(np.arange(len(batch.num_computed_tokens)), np.diff(batch.query_start_loc))


def token_slots(
    block_table: IndexArray, sequences: _Indices, positions: _Indices, *, block_size: int
) -> TokenArray:
    """Return the slots of tokens in a cache whose blocks are flattened to one row of slots.

    Args:
        block_table: [B, max_blocks].
        sequences: row of the table of each token.
        positions: the position of each token in its sequence; broadcast with `sequences`.
        block_size: tokens of a block.
    """
    blocks = block_table[sequences, positions // block_size].astype(np.int64)
    slots: TokenArray = blocks * block_size + positions % block_size
    return slots


def rows_per_run(num_tokens: int, vocab_size: int) -> int:
    """Return how many rows of `num_tokens` share a run of a graph that computes logits for every token."""
    return max(1, _MAX_LOGITS_BYTES // max(1, num_tokens * vocab_size * 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePart:
    """The part of a KV cache in the memory of one device."""

    memory: LogitsMemory
    shapes: TokenShapes     # the shapes of one token in its buffers
    states: StateShapes = field(default_factory=dict)   # the shapes of one sequence's recurrent states


class CacheSizes(TypedDict, total=False):
    """The bounds of a KV cache, which has blocks for all sequences at full length, or as many as fit."""

    max_num_seqs: Required[int]     # sequences of a forward
    max_length: int | None          # tokens of a sequence; None or 0: the graph's context
    kv_cache_bytes: int | None      # bytes of the whole cache; None: half of each device's free memory
    max_model_len: int | None       # tokens of a sequence, which must fit; None: as many as the cache holds


class CachedLogits:
    """The KV cache in blocks and the limits of a `LogitsModel`; subclasses add the forward.

    Attributes:
        cache: the keys and values.
        max_num_seqs: see `LogitsModel.max_num_seqs`; fewer than wanted if their recurrent states do not fit.
        max_length: see `LogitsModel.max_length`.
        context_length: see `LogitsFigures.context_length`.
        length_limit: see `LogitsFigures.length_limit`.
        block_size: see `LogitsModel.block_size`.
        num_blocks: see `LogitsModel.num_blocks`.
        kv_cache_bytes: largest size of the cache.
        num_state_slots: see `LogitsModel.num_state_slots`.
    """

    def __init__(
        self,
        parts: Sequence[CachePart],
        *,
        path: Path,
        context_length: int,
        max_num_seqs: int,
        max_length: int | None = None,
        kv_cache_bytes: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Reserve the cache.

        Args:
            parts: the cache in one part, or in one for each stage of a pipeline, all on devices of one kind.
            path: the model's file, for messages.
            context_length: the model's context, in tokens.
            max_num_seqs: see `CacheSizes`.
            max_length: see `CacheSizes`; the cache may hold less.
            kv_cache_bytes: see `CacheSizes`; the parts share the bytes in proportion to their size.
            max_model_len: see `CacheSizes`.

        Raises:
            RepositoryError: `max_length` exceeds the context; `max_model_len` exceeds `max_length`, or the
                cache; memory, or `kv_cache_bytes`, is too small for one block; or memory cannot be reserved.
        """
        max_length = resolve_max_length(max_length, context_length=context_length, path=path)
        self.context_length = context_length
        self.length_limit = LengthLimit.MODEL if max_length == context_length else LengthLimit.CONFIG
        if max_model_len is not None:
            check_max_model_len(
                max_model_len, max_length=max_length, context_length=context_length, path=path
            )
            max_length = max_model_len
            self.length_limit = LengthLimit.FLAG if max_length < context_length else LengthLimit.MODEL
        self.max_num_seqs = max_num_seqs
        self.block_size = parts[0].memory.block_size
        block_bytes = self.block_size * sum(token_bytes(part.shapes) for part in parts)
        self.num_state_slots = _num_state_slots(
            parts, max_num_seqs=max_num_seqs, kv_cache_bytes=kv_cache_bytes, path=path
        )
        if 0 < self.num_state_slots < 2 * max_num_seqs:
            self.max_num_seqs = self.num_state_slots // 2
            logger.warning(
                "%s: %d sequences run concurrently, not max_batch_size %d, since the recurrent states of no "
                "more fit into half of the KV cache (kv_cache_bytes; by default half of the free memory)",
                path, self.max_num_seqs, max_num_seqs,
            )
        wanted = self.max_num_seqs * -(-max_length // self.block_size)
        self.num_blocks = _num_blocks(
            parts, wanted=wanted, kv_cache_bytes=kv_cache_bytes, num_state_slots=self.num_state_slots
        )
        if not self.num_blocks:
            raise RepositoryError(
                f"{path}: the KV cache has no room for one block: {self.block_size} tokens take "
                f"{block_bytes} bytes",
                remedy="raise kv_cache_bytes in the logits stage's config.pbtxt, or free memory",
            )
        held = min(max_length, self.num_blocks * self.block_size)
        if max_model_len is not None and held < max_model_len:
            needed_bytes = -(-max_model_len // self.block_size) * block_bytes
            raise RepositoryError(
                f"{path}: --max-model-len is {max_model_len}, and so many tokens take "
                f"{needed_bytes / 2**20:,.1f} MiB of the KV cache, which has "
                f"{self.num_blocks * block_bytes / 2**20:,.1f} MiB for {held} tokens "
                f"({'half of the free memory' if kv_cache_bytes is None else 'by kv_cache_bytes'})",
                remedy=f"give at most {held}, or auto; or {LengthLimit.KV_CACHE}",
            )
        try:
            self.cache = KVCache(
                {
                    name: part.memory.zeros((self.num_blocks, self.block_size, *shape), dtype)
                    for part in parts
                    for name, (shape, dtype) in part.shapes.items()
                },
                {
                    name: part.memory.zeros((self.num_state_slots, *shape), np.dtype(np.float32))
                    for part in parts
                    for name, shape in part.states.items()
                },
            )
        except (OSError, OverflowError) as error:
            raise RepositoryError(
                f"{path}: a KV cache of {self.num_blocks * block_bytes} bytes cannot be reserved: {error}",
                remedy="lower kv_cache_bytes, max_batch_size or max_sequence_length in the logits stage's "
                "config.pbtxt",
            ) from error
        self.kv_cache_bytes = self.cache.nbytes
        self.max_length = held
        if held < max_length:
            self.length_limit = LengthLimit.KV_CACHE
            logger.warning(
                "%s: prompt and answer are limited to %d tokens, not %d, since no more fit into the %d bytes "
                "of the KV cache (kv_cache_bytes; by default half of the free memory)",
                path, self.max_length, max_length, self.kv_cache_bytes,
            )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `LogitsModel.copy_blocks`."""
        self.cache.copy_blocks(pairs)

    def close(self) -> None:
        """Do nothing: most runtimes have no threads."""


def resolve_max_length(max_sequence_length: int | None, *, context_length: int, path: Path) -> int:
    """Return the maximum tokens of a sequence: the configured length, or the graph's context length.

    Raises:
        RepositoryError: the configured length exceeds the context length; `field` is `parameters`.
    """
    if (max_sequence_length or 0) > context_length:
        raise RepositoryError(
            f"max_sequence_length is {max_sequence_length}; the context of {path.name} is {context_length}",
            remedy=f"write at most {context_length} in the logits stage's config.pbtxt, or leave it out",
            field="parameters",
        )
    return max_sequence_length or context_length


def check_max_model_len(max_model_len: int, *, max_length: int, context_length: int, path: Path) -> None:
    """Raise RepositoryError for a `--max-model-len` above what the model or its config allows.

    Args:
        max_model_len: the tokens of a sequence that the user wants.
        max_length: the most that the config allows.
        context_length: the model's own context.
        path: the model's file, for the message.
    """
    if max_model_len > context_length:
        raise RepositoryError(
            f"{path}: --max-model-len is {max_model_len}; the context of the model is {context_length}",
            remedy=f"give at most {context_length}, or auto",
        )
    if max_model_len > max_length:
        raise RepositoryError(
            f"{path}: --max-model-len is {max_model_len}; max_sequence_length in the config.pbtxt of its "
            f"logits stage limits the model to {max_length} of its {context_length} tokens",
            remedy=f"write at most {context_length} there, or leave it out",
        )


def _num_blocks(
    parts: Sequence[CachePart], *, wanted: int, kv_cache_bytes: int | None, num_state_slots: int
) -> int:
    """Return the blocks of a cache: `wanted`, or as many as fit beside the states where least room is left.

    Each device gets its share of `kv_cache_bytes`.
    """
    total_bytes = sum(token_bytes(part.shapes) for part in parts)
    num_blocks = wanted
    for on_device in _by_device(parts):
        memory, num_bytes = on_device[0].memory, sum(token_bytes(part.shapes) for part in on_device)
        if not num_bytes:
            continue
        share = None if kv_cache_bytes is None else kv_cache_bytes * num_bytes // total_bytes
        block_bytes = memory.block_size * num_bytes
        state_bytes = num_state_slots * sum(slot_bytes(part.states) for part in on_device)
        budget = _budget(memory, share, wanted * block_bytes + state_bytes)
        num_blocks = min(num_blocks, (budget - state_bytes) // block_bytes)
    return max(num_blocks, 0)


def _num_state_slots(
    parts: Sequence[CachePart], *, max_num_seqs: int, kv_cache_bytes: int | None, path: Path
) -> int:
    """Return the slots of recurrent states: two for each sequence, and as many for prefixes, or what fits.

    States take at most half of the memory of the cache.

    Raises:
        RepositoryError: the two slots of one sequence do not fit.
    """
    total_bytes = sum(slot_bytes(part.states) for part in parts)
    if not total_bytes:
        return 0
    num_slots = 4 * max_num_seqs
    for on_device in _by_device(parts):
        memory, num_bytes = on_device[0].memory, sum(slot_bytes(part.states) for part in on_device)
        if num_bytes:
            share = None if kv_cache_bytes is None else kv_cache_bytes * num_bytes // total_bytes
            budget = _budget(memory, share, 2 * num_slots * num_bytes)
            num_slots = min(num_slots, budget // 2 // num_bytes)
    if num_slots < 2:
        raise RepositoryError(
            f"{path}: half of the KV cache has no room for the recurrent states of a sequence, which needs "
            f"two slots of {total_bytes} bytes",
            remedy="raise kv_cache_bytes in the logits stage's config.pbtxt, or free memory",
        )
    return num_slots


def _by_device(parts: Sequence[CachePart]) -> list[list[CachePart]]:
    devices: dict[tuple[str, int], list[CachePart]] = {}
    for part in parts:
        devices.setdefault((part.memory.device, part.memory.device_id), []).append(part)
    return [*devices.values()]


def _budget(memory: LogitsMemory, kv_cache_bytes: int | None, wanted_bytes: int) -> int:
    """Return the bound of the cache's size."""
    free_bytes = memory.free_bytes()
    if free_bytes is None:
        return kv_cache_bytes or wanted_bytes
    if memory.is_lazy:
        return kv_cache_bytes or free_bytes // 2
    # The whole cache is allocated now, and a run needs memory as well.
    return min(kv_cache_bytes or free_bytes // 2, free_bytes * 9 // 10)
