"""Setting: one way to run a logits stage, and the plan of those that are measured."""

from __future__ import annotations

import os
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from genserve.backends.parameters import integer_parameter
from genserve.config.edit import ConfigChange, change_message
from genserve.config.model_config import ModelConfig, OldestStrategy
from genserve.config.parse import inspect_message
from genserve.errors import RepositoryError
from genserve.repository.index import ModelEntry
from genserve.repository.logits_placement import logits_placement
from genserve.tuning.graph import state_types

__all__ = ["Plan", "Setting", "change_to", "configured", "make_plan", "thread_counts"]

# The parameter that says how many threads a forward has, by backend.
THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What config.pbtxt says of how a logits stage runs."""

    graph: str              # the file in its version's folder: `default_model_filename`
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
        threads: empty: as many as there are cores, half, and a quarter of them; on a GPU, what is set now.
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
    on_gpu = logits_placement(stage).kind == "GPU"
    return Plan(
        graphs=_graphs(stage, now.graph),
        threads=_ascending((*(threads or (() if on_gpu else thread_counts(_num_cores()))), now.threads)),
        batch_sizes=_ascending((*(batch_sizes or BATCH_SIZES), now.batch_size)),
        contexts=_ascending(contexts or CONTEXTS),
    )


def change_to(setting: Setting, stage: ModelEntry) -> ConfigChange:
    """Return what a setting changes in the config of a logits stage.

    Raises:
        RepositoryError: its graph is another one, and cannot be read.
    """
    config = stage.config
    assert config is not None  # or it would have an error
    now = Setting.of(config)
    return ConfigChange(
        fields={
            "max_batch_size": setting.batch_size,
            **_num_candidates(config, setting.batch_size),
            **(_graph_fields(stage, config, setting.graph) if setting.graph != now.graph else {}),
        },
        parameters={THREADS[config.backend]: str(setting.threads)} if setting.threads != now.threads else {},
    )


def configured(stage: ModelEntry, setting: Setting) -> ModelEntry:
    """Return the stage as if a setting were written into its config.

    Raises:
        RepositoryError: see `change_to`.
    """
    message = deepcopy(stage.parsed.message)
    change_message(message, change_to(setting, stage))
    return replace(stage, parsed=inspect_message(message, path=stage.parsed.path, folder=stage.path))


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return the thread counts that are worth a look: all cores, half (hyper-threads), a quarter."""
    return _ascending(max(1, cores // part) for part in (1, 2, 4))


def _graphs(stage: ModelEntry, current: str) -> tuple[str, ...]:
    """The current graph and those beside it: `model.onnx`, `int4/model.onnx`."""
    folder, file = stage.latest_version(), Path(current).name
    found = (path.relative_to(folder).as_posix() for path in (*folder.glob(file), *folder.glob(f"*/{file}")))
    return tuple(sorted({current, *found}))


def _num_candidates(config: ModelConfig, batch_size: int) -> dict[str, int]:
    oldest = config.sequence_batching.strategy if config.sequence_batching else None
    if not isinstance(oldest, OldestStrategy) or not oldest.max_candidate_sequences:
        return {}   # it is as many as the batch size
    return {"sequence_batching.oldest.max_candidate_sequences": batch_size}


def _graph_fields(stage: ModelEntry, config: ModelConfig, graph: str) -> dict[str, str]:
    """The fields that name a graph, and the types of its KV cache."""
    states = config.sequence_batching.states if config.sequence_batching else ()
    types = state_types(stage.latest_version() / graph) if config.backend == "onnxruntime" else {}
    return {"default_model_filename": graph} | {
        f"sequence_batching.state[{index}].data_type": types[state.input_name]
        for index, state in enumerate(states)
        if state.input_name in types
    }


def _ascending(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
