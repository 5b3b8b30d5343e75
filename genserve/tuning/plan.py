"""Plan: which settings of a logits stage are measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from genserve.backends.onnx_session import num_cores
from genserve.errors import RepositoryError
from genserve.repository.index import ModelEntry
from genserve.repository.logits_placement import logits_placement
from genserve.tuning.setting import Setting

__all__ = ["Plan", "make_plan", "thread_counts"]

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (64, 512)


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
        threads=_ascending((*(threads or (() if on_gpu else thread_counts(num_cores()))), now.threads)),
        batch_sizes=_ascending((*(batch_sizes or _BATCH_SIZES), now.batch_size)),
        contexts=_ascending(contexts or _CONTEXTS),
    )


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return the thread counts that are worth a look: all cores, half (hyper-threads), a quarter."""
    return _ascending(max(1, cores // part) for part in (1, 2, 4))


def _graphs(stage: ModelEntry, current: str) -> tuple[str, ...]:
    """The current graph and those beside it: `model.onnx`, `int4/model.onnx`."""
    folder, file = stage.latest_version(), Path(current).name
    found = (path.relative_to(folder).as_posix() for path in (*folder.glob(file), *folder.glob(f"*/{file}")))
    return tuple(sorted({current, *found}))


def _ascending(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))
