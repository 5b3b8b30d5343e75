"""Setting: one way to run a logits stage, and the plan of those that are measured."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from genserve.backends.parameters import integer_parameter
from genserve.config.model_config import ModelConfig
from genserve.errors import RepositoryError
from genserve.repository.index import ModelEntry

__all__ = ["THREADS", "Plan", "Setting", "configured", "make_plan", "thread_counts"]

# The parameter that says how many threads a forward has, by backend.
THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What config.pbtxt says of how a logits stage runs."""

    graph: str              # the file in its version folder: `default_model_filename`
    threads: int            # of one forward: the parameter of THREADS
    batch_size: int         # sequences that share a step: `max_batch_size`

    @classmethod
    def of(cls, config: ModelConfig) -> Setting:
        """Return what a config says now."""
        threads = integer_parameter(config.parameters, THREADS[config.backend], default=0)
        return cls(
            graph=config.default_model_filename,
            threads=threads if threads > 0 else _num_cores(),
            batch_size=config.max_batch_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All settings that are measured are the combinations of these; each is ascending, without repetition."""

    graphs: tuple[str, ...]
    threads: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]       # tokens that each sequence has behind it, or as many as it can


def make_plan(
    stage: ModelEntry,
    *,
    batch_sizes: Iterable[int] = (),
    threads: Iterable[int] = (),
    contexts: Iterable[int] = (),
) -> Plan:
    """Plan what to measure of a logits stage: the graphs of its version folder, and what it is set to now.

    Args:
        stage: the logits stage.
        batch_sizes: empty: powers of two from 1 to 64.
        threads: empty: as many as there are cores, half, and a quarter of them.
        contexts: empty: 64 and 512.

    Raises:
        RepositoryError: the stage takes one sequence at a time.
    """
    config = stage.config
    assert config is not None  # or it would have an error
    if config.max_batch_size < 1:
        raise RepositoryError(
            f"model {stage.name!r} has max_batch_size 0, so that its sequences share no steps",
            remedy="export it anew: `genserve export` writes a config of which this is a number to choose",
        )
    now = Setting.of(config)
    return Plan(
        graphs=_graphs(stage, now.graph),
        threads=_ascending((*(threads or thread_counts(_num_cores())), now.threads)),
        batch_sizes=_ascending((*(batch_sizes or BATCH_SIZES), now.batch_size)),
        contexts=_ascending(contexts or CONTEXTS),
    )


def configured(stage: ModelEntry, setting: Setting) -> ModelEntry:
    """Return the stage with a setting in its config, in memory, as if it were written there."""
    config = stage.config
    assert config is not None
    changed = replace(
        config,
        default_model_filename=setting.graph,
        max_batch_size=setting.batch_size,
        parameters={**config.parameters, THREADS[config.backend]: str(setting.threads)},
    )
    return replace(stage, parsed=replace(stage.parsed, config=changed))


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return the thread counts that are worth a look: all cores, half (hyper-threads), a quarter."""
    return _ascending(max(1, cores // part) for part in (1, 2, 4))


def _graphs(stage: ModelEntry, current: str) -> tuple[str, ...]:
    """The current graph and those beside it: `model.onnx`, `model.int4.onnx`."""
    folder = stage.latest_version()
    suffix = (folder / current).suffix
    return tuple(sorted({current, *(path.name for path in folder.glob(f"model*{suffix}"))}))


def _ascending(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
