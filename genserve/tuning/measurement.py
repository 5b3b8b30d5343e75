"""Measurement: runs a logits stage with each setting in turn, as a server does, and times its steps."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

import numpy as np

from genserve.engine.logits_model import ForwardBatch, IndexArray, LogitsModel
from genserve.repository.index import ModelEntry
from genserve.repository.model_loader import load_stage_logits
from genserve.tuning.search_space import SearchSpace, Setting, with_setting

_NUM_STEPS = 3      # per sample, after a warmup step that binds buffers and allocates memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The time of consecutive steps with one setting."""

    setting: Setting
    context: int                    # tokens in the KV cache of each sequence
    steps_s: tuple[float, ...]
    cpu_s: float                    # CPU time of the thread, for all steps together
    token_bytes: int                # size of the KV cache per token of a sequence; 0: no cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The median step times of one setting."""

    setting: Setting
    step_s: Mapping[int, float]     # the median of the steps, by context
    token_bytes: int                # see `Sample`

    @property
    def tokens_per_s(self) -> float:
        """The rate of all sequences together, with an equal number of tokens at each context."""
        return self.setting.batch_size * len(self.step_s) / sum(self.step_s.values())

    @property
    def inter_token_s(self) -> float:
        """The time between two tokens of a sequence, at the slowest context."""
        return max(self.step_s.values())

    @property
    def cache_bytes(self) -> int:
        """The size of the batch's KV cache at the longest context, bytes."""
        return self.setting.batch_size * max(self.step_s) * self.token_bytes


class Samples:
    """Collects samples, and computes the medians of each setting."""

    def __init__(self) -> None:
        self._steps_s: dict[Setting, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._token_bytes: dict[Setting, int] = {}
        self._elapsed_s = self._cpu_s = 0.0

    def add(self, sample: Sample) -> None:
        """Add a sample."""
        self._elapsed_s += sum(sample.steps_s)
        self._cpu_s += sample.cpu_s
        self._steps_s[sample.setting][sample.context] += sample.steps_s
        self._token_bytes[sample.setting] = sample.token_bytes

    @property
    def stolen_share(self) -> float:
        """The share of the time in which other programs had the core of the computing thread, from 0 to 1."""
        return max(0.0, 1 - self._cpu_s / self._elapsed_s) if self._elapsed_s else 0.0

    def measurements(self) -> list[Measurement]:
        """Return the settings that have samples at every context, in the order of their first sample."""
        contexts = {context for by_context in self._steps_s.values() for context in by_context}
        return [
            Measurement(
                setting=setting,
                step_s={context: median(by_context[context]) for context in sorted(contexts)},
                token_bytes=self._token_bytes[setting],
            )
            for setting, by_context in self._steps_s.items()
            if by_context.keys() == contexts
        ]


def take_samples(
    stage: ModelEntry, space: SearchSpace, *, budget_s: float, max_step_s: float
) -> Iterator[Sample]:
    """Yield samples of all settings, round after round, until the budget is spent.

    A session has a fixed number of threads, and two open sessions would compete for the cores. So only one
    session is open at a time, and each round opens it again. Rounds alternate their direction, so that a
    machine that slows down does so for all sessions.

    No sample begins after `budget_s`, but the first round is always complete. Once a step of a session is
    slower than `max_step_s`, the session is not measured with more sequences.

    Raises:
        RepositoryError: a graph cannot be loaded.
        MissingDependency: the runtime of the stage is not installed.
    """
    end_s = time.perf_counter() + budget_s
    sessions = list(itertools.product(space.graphs, space.threads))
    for number in itertools.count():
        for graph, threads in sessions if number % 2 == 0 else reversed(sessions):
            for sample in _sample_session(stage, space, graph=graph, threads=threads, max_step_s=max_step_s):
                yield sample
                if number > 0 and time.perf_counter() >= end_s:
                    return


def _sample_session(
    stage: ModelEntry, space: SearchSpace, *, graph: str, threads: int, max_step_s: float
) -> Iterator[Sample]:
    """Open a session, and yield a sample at each context for each setting that fits into the KV cache."""
    largest = Setting(graph=graph, threads=threads, batch_size=max(space.batch_sizes))
    entry = with_setting(stage, largest)
    model = load_stage_logits(entry)
    token_bytes = model.kv_cache_bytes // (model.num_blocks * model.block_size)
    contexts = sorted({min(context, model.max_length - 1) for context in space.contexts})
    table = _block_table(model, num_tokens=contexts[-1] + 1)
    num_filled = 0
    for batch_size in space.batch_sizes:
        if batch_size > len(table):
            return
        _fill(model, table[:batch_size], num_filled=num_filled, num_tokens=contexts[-1])
        num_filled, longest_s = batch_size, 0.0
        for context in contexts:
            setting = replace(largest, batch_size=batch_size)
            sample = _sample(model, setting, table[:batch_size], context=context, token_bytes=token_bytes)
            longest_s = max(longest_s, min(sample.steps_s))
            yield sample
        if longest_s > max_step_s:
            return


def _block_table(model: LogitsModel, *, num_tokens: int) -> IndexArray:
    """Return the block table of as many sequences of `num_tokens` as fit into the cache and a batch."""
    blocks_per_sequence = -(-num_tokens // model.block_size)
    num_seqs = min(model.max_num_seqs, model.num_blocks // blocks_per_sequence)
    return np.arange(num_seqs * blocks_per_sequence, dtype=np.int32).reshape(num_seqs, -1)


def _fill(model: LogitsModel, table: IndexArray, *, num_filled: int, num_tokens: int) -> None:
    """Fill the KV cache of the sequences from `num_filled` on, since unwritten memory is read too fast."""
    if num_filled == 0:
        token_ids = np.random.default_rng(0).integers(model.vocab_size, size=(1, num_tokens))
        batch = ForwardBatch.of(
            token_ids,
            num_computed_tokens=[0],
            block_table=table[:1],
            state_source=_slots(model, 1),
            state_target=_slots(model, 1),
        )
        model.forward(batch)
    for blocks in table[max(1, num_filled) :].tolist():
        model.copy_blocks(list(zip(table[0].tolist(), blocks, strict=True)))


def _sample(
    model: LogitsModel, setting: Setting, table: IndexArray, *, context: int, token_bytes: int
) -> Sample:
    """Time decode steps, all at the same positions."""
    computed = [context] * len(table)
    slots = _slots(model, len(table))
    batch = ForwardBatch.of(
        [[0]] * len(table),
        num_computed_tokens=computed,
        block_table=table,
        state_source=slots,
        state_target=slots,
    )
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


def _slots(model: LogitsModel, num_seqs: int) -> IndexArray | None:
    """Return a state slot for each sequence, if the model has states."""
    return np.arange(num_seqs, dtype=np.int32) if model.num_state_slots else None


def _step_s(model: LogitsModel, batch: ForwardBatch) -> float:
    started_s = time.perf_counter()
    model.forward(batch)
    return time.perf_counter() - started_s


_NOISE = 0.03   # the relative scatter of medians within one run


class Objective(StrEnum):
    """The quantity to optimise."""

    THROUGHPUT = "throughput"   # tokens per second of all sequences together
    LATENCY = "latency"         # the time between tokens of a single sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The objective, and the bound that it must keep."""

    objective: Objective
    max_inter_token_s: float    # upper bound of the time between two tokens of a sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSetting:
    """The chosen setting."""

    best: Measurement
    meets_bound: bool           # whether the setting is within `max_inter_token_s`; False: no setting is


def choose(measurements: Sequence[Measurement], *, goal: Goal, current: Setting) -> BestSetting:
    """Return the best setting for a goal.

    For throughput, the best setting has the most tokens per second within the bound. For latency, the fastest
    step of the smallest batch decides about graph and threads, and then the throughput about the batch size.
    Among settings that differ only by noise, the current setting wins, or else the one with the shortest
    step.

    Args:
        measurements: at least one.
        goal: the objective; if no setting is within the bound, the one with the shortest step is chosen.
        current: the setting in the config.
    """
    within = [m for m in measurements if m.inter_token_s <= goal.max_inter_token_s]
    if not within:
        return BestSetting(best=min(measurements, key=lambda m: m.inter_token_s), meets_bound=False)
    if goal.objective is Objective.LATENCY:
        within = _fastest_alone(within, current=current)
    most = max(m.tokens_per_s for m in within)
    nearly = [m for m in within if m.tokens_per_s >= most * (1 - _NOISE)]
    unchanged = [m for m in nearly if m.setting == current]
    return BestSetting(best=min(unchanged or nearly, key=lambda m: m.inter_token_s), meets_bound=True)


def eligible(
    measurements: Sequence[Measurement], *, agreements: Mapping[str, float], least: float, current: Setting
) -> list[Measurement]:
    """Return the measurements of graphs that agree well enough with their source.

    `agreements` has the known top-1 agreements of graphs with their source, from 0 to 1, and `least` is the
    required agreement. The current graph, and graphs of unknown agreement, are always eligible.
    """
    return [
        m
        for m in measurements
        if m.setting.graph == current.graph or agreements.get(m.setting.graph, 1.0) >= least
    ]


def _fastest_alone(measurements: Sequence[Measurement], *, current: Setting) -> list[Measurement]:
    """Return the measurements with the graph and threads whose step of the smallest batch is the fastest."""
    smallest = min(m.setting.batch_size for m in measurements)
    alone = [m for m in measurements if m.setting.batch_size == smallest]
    least_s = min(m.inter_token_s for m in alone)
    nearly = [m for m in alone if m.inter_token_s <= least_s * (1 + _NOISE)]
    unchanged = [m for m in nearly if _session(m.setting) == _session(current)]
    fastest = min(unchanged or nearly, key=lambda m: m.inter_token_s)
    return [m for m in measurements if _session(m.setting) == _session(fastest.setting)]


def _session(setting: Setting) -> tuple[str, int]:
    return setting.graph, setting.threads
