"""Trial: a logits stage run with one setting after the other, as the server would run it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from genserve.generation.logits_model import ForwardBatch, LogitsModel, TokenArray
from genserve.repository.index import ModelEntry
from genserve.repository.logits_placement import logits_placement
from genserve.repository.logits_runtime import load_logits
from genserve.tuning.measurement import Sample
from genserve.tuning.plan import Plan
from genserve.tuning.setting import Setting, configured

__all__ = ["even_batch", "samples"]

_CHUNK = 256        # tokens of a forward that fills the cache
_NUM_STEPS = 3      # of a sample, after one that does not count: it pays for bindings and memory


def samples(stage: ModelEntry, plan: Plan, *, budget_s: float, too_long_s: float) -> Iterator[Sample]:
    """Run all settings in turns, round after round, until the time is over; the first round is a whole one.

    A session has its number of threads for good, and two sessions take each other's cores; so there is
    one at a time, opened again in each round. Rounds go through the sessions back and forth, so that a
    machine that becomes slower does so for all of them.

    Args:
        stage: the logits stage.
        plan: the settings.
        budget_s: no sample begins after so many seconds, but for those of the first round.
        too_long_s: a session whose step takes longer is not tried with more sequences.

    Raises:
        RepositoryError: a graph cannot be loaded.
        MissingDependency: the runtime of the stage is not installed.
    """
    end_s = time.perf_counter() + budget_s
    sessions = list(itertools.product(plan.graphs, plan.threads))
    for number in itertools.count():
        for graph, threads in sessions if number % 2 == 0 else reversed(sessions):
            for sample in _visit(stage, plan, graph=graph, threads=threads, too_long_s=too_long_s):
                yield sample
                if number > 0 and time.perf_counter() >= end_s:
                    return


def _visit(
    stage: ModelEntry, plan: Plan, *, graph: str, threads: int, too_long_s: float
) -> Iterator[Sample]:
    """Open a session, and take one sample of each of its settings that fit into the cache at each context."""
    largest = Setting(graph=graph, threads=threads, batch_size=max(plan.batch_sizes))
    entry = configured(stage, largest)
    model = load_logits(entry, placement=logits_placement(entry))
    size = model.block_size
    token_bytes = model.kv_cache_bytes // (model.num_blocks * size)
    contexts = sorted({min(context, model.max_length - 1) for context in plan.contexts})
    num_blocks = contexts[-1] // size + 1       # of a sequence, with one token more than the longest context
    num_filled = 0
    for batch_size in plan.batch_sizes:
        if batch_size > model.max_num_seqs or batch_size * num_blocks > model.num_blocks:
            return
        _fill(model, range(num_filled, batch_size), num_blocks=num_blocks)
        num_filled, longest_s = batch_size, 0.0
        for context in contexts:
            setting = replace(largest, batch_size=batch_size)
            sample = _sample(model, setting, context=context, num_blocks=num_blocks, token_bytes=token_bytes)
            longest_s = max(longest_s, min(sample.steps_s))
            yield sample
        if longest_s > too_long_s:
            return


def _fill(model: LogitsModel, sequences: range, *, num_blocks: int) -> None:
    """Give sequences the same tokens. Memory that was never written would be read too fast."""
    if sequences.start == 0:
        num_tokens = min(num_blocks * model.block_size, model.max_length)
        token_ids = np.random.default_rng(0).integers(model.vocab_size, size=num_tokens)
        for first in range(0, num_tokens, _CHUNK):
            chunk = token_ids[None, first : first + _CHUNK]
            model.forward(even_batch(chunk, num_computed=first, num_blocks=num_blocks))
    targets = range(max(1, sequences.start) * num_blocks, sequences.stop * num_blocks)
    model.copy_blocks([(target % num_blocks, target) for target in targets])


def even_batch(token_ids: TokenArray, *, num_computed: int, num_blocks: int) -> ForwardBatch:
    """Return the forward of as many tokens of each sequence, with logits behind the last one.

    Args:
        token_ids: [B, n] int64.
        num_computed: tokens that each sequence has in the cache already.
        num_blocks: that each sequence has, the first one those from block 0 on.
    """
    num_seqs, num_tokens = token_ids.shape
    starts = np.arange(num_seqs + 1, dtype=np.int32) * np.int32(num_tokens)
    return ForwardBatch(
        token_ids=token_ids.ravel(),
        positions=np.tile(np.arange(num_computed, num_computed + num_tokens), num_seqs),
        query_start_loc=starts,
        num_computed_tokens=np.full(num_seqs, num_computed, dtype=np.int32),
        block_table=np.arange(num_seqs * num_blocks, dtype=np.int32).reshape(num_seqs, num_blocks),
        logits_indices=starts[1:].astype(np.int64) - 1,
    )


def _sample(
    model: LogitsModel, setting: Setting, *, context: int, num_blocks: int, token_bytes: int
) -> Sample:
    """Time decode steps, each at the same positions."""
    token_ids = np.zeros((setting.batch_size, 1), dtype=np.int64)
    batch = even_batch(token_ids, num_computed=context, num_blocks=num_blocks)
    model.forward(batch)
    cpu_started_s = time.thread_time()
    steps_s = tuple(_step_s(model, batch) for _ in range(_NUM_STEPS))
    return Sample(
        setting=setting,
        context=context,
        steps_s=steps_s,
        cpu_s=time.thread_time() - cpu_started_s,
        token_bytes=token_bytes,
    )


def _step_s(model: LogitsModel, batch: ForwardBatch) -> float:
    started_s = time.perf_counter()
    model.forward(batch)
    return time.perf_counter() - started_s
