"""Size rules: the threads, sequences and buffers that a config asks for, against this machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from genserve.config.diagnostics import Diagnostic
from genserve.config.model_config import ModelConfig, OldestStrategy
from genserve.config.normalise import num_gpus
from genserve.errors import RepositoryError
from genserve.machine import byte_size, total_memory_bytes
from genserve.repository.rules.facts import ConfigFacts, ModelFacts
from genserve.repository.text_stages import Role
from genserve.tensor import DataType
from genserve.textmodel.logits_config import CacheKind, cache_kind, context_length

# More than anyone needs, and still quickly allocated.
_MAX_INSTANCES = 4096           # each is a thread or a process
_MAX_SEQUENCES = 2**20          # concurrent, of all instances
_STRING_BYTES = 64              # the memory of an empty string in an array, roughly


def check_sizes(facts: ModelFacts) -> Iterator[Diagnostic]:
    """Reject sizes that this machine has no memory for, before they are allocated."""
    is_logits = facts.role in (Role.LOGITS, Role.LOGITS_WITHOUT_CACHE)    # an engine runs its sequences
    yield from _instances(facts)
    yield from _sequences(facts, is_logits=is_logits)
    available = total_memory_bytes()
    if available is None:
        return
    for path, name, num_bytes in _needs(facts.config, is_logits=is_logits):
        if num_bytes > available:
            message = f"{name} would take {num_bytes} bytes; this machine has {available}"
            yield facts.error(path, message, remedy="write smaller sizes")
    if facts.role is Role.LOGITS:
        yield from _kv_cache(facts, available=available)


def _instances(facts: ConfigFacts) -> Iterator[Diagnostic]:
    total = 0
    for index, group in enumerate(facts.config.instance_groups):
        total += max(1, group.count) * max(1, len(group.gpus))
        if total > _MAX_INSTANCES:
            message = (
                f"{total} instances are configured, each with its own thread; the limit is {_MAX_INSTANCES}"
            )
            remedy = "write at most the number of cores, or of GPUs"
            yield facts.error(f"instance_group[{index}].count", message, remedy=remedy)
            return


def _sequences(facts: ConfigFacts, *, is_logits: bool) -> Iterator[Diagnostic]:
    config, batching = facts.config, facts.config.sequence_batching
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
        yield facts.error(path, message, remedy="set it to the number of concurrent sequences")


def _kv_cache(facts: ConfigFacts, *, available: int) -> Iterator[Diagnostic]:
    """Yield a warning if the limit of a KV cache exceeds the memory of the host."""
    asked = byte_size(facts.config.parameters.get("kv_cache_bytes", "")) or 0
    if asked > available and not num_gpus():
        yield facts.warning(
            "parameters",
            f"kv_cache_bytes is {asked}; this machine has {available} bytes, and a server whose cache grows "
            "beyond them is killed",
            remedy="write less, or leave it out: the default is half of the free memory",
            key="kv_cache_bytes",
        )


def _needs(config: ModelConfig, *, is_logits: bool) -> Iterator[tuple[str, str, int]]:
    """Yield the path of a field, the name of what is allocated for it, and its bytes."""
    for index, sample in enumerate(config.warmups):
        num_bytes = sum(_num_bytes(spec.data_type, spec.dims) for spec in sample.inputs) * sample.batch_size
        yield f"model_warmup[{index}]", f"warmup sample '{sample.name}'", num_bytes
    if not is_logits:   # the states of a logits stage are its KV cache
        states = config.sequence_batching.states if config.sequence_batching else ()
        for index, state in enumerate(states):
            dims = state.dims if state.initial_state is None else state.initial_state.dims
            path, name = f"sequence_batching.state[{index}]", f"the state '{state.input_name}' of a sequence"
            yield path, name, _num_bytes(state.data_type, dims)
        return
    max_num_seqs = max(1, config.max_batch_size)
    for index, spec in enumerate(config.outputs):
        vocab_size = max(1, *spec.dims[-1:])
        name = f"a row of '{spec.name}' for each of {max_num_seqs} sequences"
        path = "max_batch_size" if vocab_size < max_num_seqs else f"output[{index}].dims"
        yield path, name, max_num_seqs * vocab_size * 4
    if cache_kind(config) is CacheKind.NONE:
        try:
            longest = context_length(config)
        except RepositoryError:
            return      # the rules of parameters report it
        name = f"the token ids of {max_num_seqs} sequences of {longest} tokens"
        yield "parameters", name, max_num_seqs * longest * 8


def _num_bytes(data_type: str, dims: Sequence[int]) -> int:
    try:
        itemsize = DataType.from_config_name(data_type).itemsize or _STRING_BYTES
    except KeyError:    # the rules of tensors report it
        itemsize = 1
    return math.prod(max(1, dim) for dim in dims) * itemsize
