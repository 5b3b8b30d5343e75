"""Size rules: what a config asks for that this machine has no room for, told before any of it is made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from genserve.backends.free_memory import total_memory_bytes
from genserve.config.byte_size import byte_size
from genserve.config.fault import Fault, Severity
from genserve.config.honoured import Role
from genserve.config.model_config import ModelConfig, OldestStrategy
from genserve.data_type import DataType
from genserve.errors import RepositoryError
from genserve.repository.devices import num_gpus
from genserve.repository.index import ModelEntry
from genserve.repository.logits_runtime import CacheKind, cache_kind, context_length

__all__ = ["size_faults"]

# More than anybody has use for, and still quickly made.
_MAX_INSTANCES = 4096           # each is a thread, or a process
_MAX_SEQUENCES = 2**20          # at a time, of all instances
_MAX_PRIORITY_LEVELS = 2**16    # each has a queue
_STRING_BYTES = 64              # of an empty one in an array, roughly


def size_faults(entry: ModelEntry, config: ModelConfig, role: Role | None) -> Iterator[Fault]:
    """Yield the sizes that are too large.

    Args:
        entry: the model.
        config: its config.
        role: what it is to a text model.
    """
    is_logits = role in (Role.LOGITS, Role.LOGITS_WITHOUT_CACHE)    # an engine runs its sequences
    yield from _instances(entry, config)
    yield from _priorities(entry, config)
    yield from _sequences(entry, config, is_logits=is_logits)
    available = total_memory_bytes()
    if available is None:
        return
    for path, what, num_bytes in _needs(config, is_logits=is_logits):
        if num_bytes > available:
            message = f"{what} would take {num_bytes} bytes; this machine has {available}"
            yield _fault(entry, path, message, remedy="write smaller sizes")
    if role is Role.LOGITS:
        yield from _kv_cache(entry, config, available=available)


def _instances(entry: ModelEntry, config: ModelConfig) -> Iterator[Fault]:
    total = 0
    for index, group in enumerate(config.instance_groups):
        total += max(1, group.count) * max(1, len(group.gpus))
        if total > _MAX_INSTANCES:
            message = (
                f"{total} instances are configured, each with its own thread; the limit is {_MAX_INSTANCES}"
            )
            remedy = "write no more than there are cores, or GPUs"
            yield _fault(entry, f"instance_group[{index}].count", message, remedy=remedy)
            return


def _priorities(entry: ModelEntry, config: ModelConfig) -> Iterator[Fault]:
    levels = config.dynamic_batching.priority_levels if config.dynamic_batching else 0
    if levels > _MAX_PRIORITY_LEVELS:
        message = f"priority_levels is {levels}, each with its own queue; the limit is {_MAX_PRIORITY_LEVELS}"
        remedy = "set it to the number of priorities that clients use"
        yield _fault(entry, "dynamic_batching.priority_levels", message, remedy=remedy)


def _sequences(entry: ModelEntry, config: ModelConfig, *, is_logits: bool) -> Iterator[Fault]:
    batching = config.sequence_batching
    count, path = max(1, config.max_batch_size), "max_batch_size"
    if not is_logits:
        if batching is None:
            return
        if isinstance(batching.strategy, OldestStrategy) and batching.strategy.max_candidate_sequences:
            count = batching.strategy.max_candidate_sequences
            path = "sequence_batching.oldest.max_candidate_sequences"
        count *= sum(max(1, group.count) for group in config.instance_groups) or 1
    if count > _MAX_SEQUENCES:
        message = f"{count} concurrent sequences are configured; the limit is {_MAX_SEQUENCES}"
        yield _fault(entry, path, message, remedy="set it to the number that is to run concurrently")


def _kv_cache(entry: ModelEntry, config: ModelConfig, *, available: int) -> Iterator[Fault]:
    """Yield a warning if the bound of a KV cache in the host's memory bounds nothing."""
    asked = byte_size(config.parameters.get("kv_cache_bytes", "")) or 0
    if asked > available and not num_gpus():
        yield entry.parsed.fault(
            Severity.WARNING,
            "parameters",
            f"kv_cache_bytes is {asked}; this machine has {available} bytes, and a cache that grows beyond "
            "them ends the server",
            remedy="write less, or leave it out: half of what is free at the load",
            key="kv_cache_bytes",
        )


def _needs(config: ModelConfig, *, is_logits: bool) -> Iterator[tuple[str, str, int]]:
    """Yield the path of a field, what is made by it, and how many bytes that takes."""
    for index, sample in enumerate(config.warmups):
        num_bytes = sum(_num_bytes(spec.data_type, spec.dims) for spec in sample.inputs) * sample.batch_size
        yield f"model_warmup[{index}]", f"warmup sample '{sample.name}'", num_bytes
    if not is_logits:   # whose states are the KV cache
        states = config.sequence_batching.states if config.sequence_batching else ()
        for index, state in enumerate(states):
            dims = state.dims if state.initial_state is None else state.initial_state.dims
            path, what = f"sequence_batching.state[{index}]", f"the state '{state.input_name}' of a sequence"
            yield path, what, _num_bytes(state.data_type, dims)
        return
    max_num_seqs = max(1, config.max_batch_size)
    for index, spec in enumerate(config.outputs):
        vocab_size = max(1, *spec.dims[-1:])
        what = f"a row of '{spec.name}' for each of {max_num_seqs} sequences"
        path = "max_batch_size" if vocab_size < max_num_seqs else f"output[{index}].dims"
        yield path, what, max_num_seqs * vocab_size * 4
    if cache_kind(config) is CacheKind.NONE:
        try:
            longest = context_length(config)
        except RepositoryError:
            return      # which is a fault of the parameters
        what = f"the token ids of {max_num_seqs} sequences of {longest} tokens"
        yield "parameters", what, max_num_seqs * longest * 8


def _num_bytes(data_type: str, dims: Sequence[int]) -> int:
    try:
        itemsize = DataType.from_config_name(data_type).itemsize or _STRING_BYTES
    except KeyError:    # which is a fault of the tensor
        itemsize = 1
    return math.prod(max(1, dim) for dim in dims) * itemsize


def _fault(entry: ModelEntry, path: str, message: str, *, remedy: str) -> Fault:
    return entry.parsed.fault(Severity.ERROR, path, message, remedy=remedy)
