"""Trial: a logits stage run with one setting after the other, as the server would run it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from genserve.generation.logits_model import LogitsModel, TokenArray
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
    token_bytes = model.kv_cache_bytes // model.max_cached_tokens
    contexts = sorted({min(context, model.max_length - 1) for context in plan.contexts})
    num_filled = 0
    slot_tokens = -(-(contexts[-1] + 1) // model.page_tokens) * model.page_tokens
    for batch_size in plan.batch_sizes:
        if batch_size > model.num_slots or batch_size * slot_tokens > model.max_cached_tokens:
            return
        _fill(model, range(num_filled, batch_size), num_tokens=contexts[-1])
        num_filled, longest_s = batch_size, 0.0
        for context in contexts:
            setting = replace(largest, batch_size=batch_size)
            sample = _sample(model, setting, context=context, token_bytes=token_bytes)
            longest_s = max(longest_s, min(sample.steps_s))
            yield sample
        if longest_s > too_long_s:
            return


def _fill(model: LogitsModel, slots: range, *, num_tokens: int) -> None:
    """Give slots the same tokens. Memory that was never written would be read too fast."""
    token_ids = np.random.default_rng(0).integers(model.vocab_size, size=num_tokens)
    for slot in slots:
        if slot == 0:
            model.prefill([token_ids.tolist()], first_slot=0, past=0)
        else:
            model.move(source=0, target=slot, length=num_tokens)


def _sample(model: LogitsModel, setting: Setting, *, context: int, token_bytes: int) -> Sample:
    """Time decode steps, each at the same positions."""
    token_ids = np.zeros(setting.batch_size, dtype=np.int64)
    past = np.full(setting.batch_size, context, dtype=np.int64)
    model.decode(token_ids, past)
    cpu_started_s = time.thread_time()
    steps_s = tuple(_step_s(model, token_ids, past) for _ in range(_NUM_STEPS))
    return Sample(
        setting=setting,
        context=context,
        steps_s=steps_s,
        cpu_s=time.thread_time() - cpu_started_s,
        token_bytes=token_bytes,
    )


def _step_s(model: LogitsModel, token_ids: TokenArray, past: TokenArray) -> float:
    started_s = time.perf_counter()
    model.decode(token_ids, past)
    return time.perf_counter() - started_s
