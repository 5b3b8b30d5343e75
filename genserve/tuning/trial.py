"""Trial: a logits stage run with one setting after the other, as the server would run it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from genserve.generation.logits_model import ForwardBatch, IndexArray, LogitsModel
from genserve.repository.index import ModelEntry
from genserve.repository.logits_placement import logits_placement
from genserve.repository.logits_runtime import load_logits
from genserve.tuning.measurement import Sample
from genserve.tuning.plan import Plan
from genserve.tuning.setting import Setting, configured

__all__ = ["samples"]

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
    token_bytes = model.kv_cache_bytes // (model.num_blocks * model.block_size)
    contexts = sorted({min(context, model.max_length - 1) for context in plan.contexts})
    table = _block_table(model, num_tokens=contexts[-1] + 1)
    num_filled = 0
    for batch_size in plan.batch_sizes:
        if batch_size > len(table):
            return
        _fill(model, table[:batch_size], num_filled=num_filled, num_tokens=contexts[-1])
        num_filled, longest_s = batch_size, 0.0
        for context in contexts:
            setting = replace(largest, batch_size=batch_size)
            sample = _sample(model, setting, table[:batch_size], context=context, token_bytes=token_bytes)
            longest_s = max(longest_s, min(sample.steps_s))
            yield sample
        if longest_s > too_long_s:
            return


def _block_table(model: LogitsModel, *, num_tokens: int) -> IndexArray:
    """Return the blocks of as many sequences of so many tokens as fit into the cache and share a forward."""
    blocks_per_sequence = -(-num_tokens // model.block_size)
    num_seqs = min(model.max_num_seqs, model.num_blocks // blocks_per_sequence)
    return np.arange(num_seqs * blocks_per_sequence, dtype=np.int32).reshape(num_seqs, -1)


def _fill(model: LogitsModel, table: IndexArray, *, num_filled: int, num_tokens: int) -> None:
    """Give the sequences behind the first ones the same tokens: memory never written is read too fast."""
    if num_filled == 0:
        token_ids = np.random.default_rng(0).integers(model.vocab_size, size=(1, num_tokens))
        model.forward(ForwardBatch.of(token_ids, num_computed_tokens=[0], block_table=table[:1]))
    for blocks in table[max(1, num_filled) :].tolist():
        model.copy_blocks(list(zip(table[0].tolist(), blocks, strict=True)))


def _sample(
    model: LogitsModel, setting: Setting, table: IndexArray, *, context: int, token_bytes: int
) -> Sample:
    """Time decode steps, each at the same positions."""
    computed = [context] * len(table)
    batch = ForwardBatch.of([[0]] * len(table), num_computed_tokens=computed, block_table=table)
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
