"""Search space: the settings of a logits stage that are measured, and how a setting changes its config."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from genserve.backends.backend import integer_parameter
from genserve.backends.onnx_session import num_cores
from genserve.config.edit import ConfigChange, change_message
from genserve.config.model_config import ModelConfig, OldestStrategy
from genserve.config.parse import inspect_message
from genserve.errors import RepositoryError
from genserve.repository.index import ModelEntry
from genserve.textmodel.logits_config import read_parity
from genserve.textmodel.logits_placement import logits_placement

__all__ = [
    "SearchSpace",
    "Setting",
    "change_to",
    "configured",
    "make_search_space",
    "state_types",
    "thread_counts",
    "top1_agreement",
]


_DATA_TYPES = {"FLOAT": "TYPE_FP32", "FLOAT16": "TYPE_FP16", "INT8": "TYPE_INT8"}


def state_types(path: Path) -> dict[str, str]:
    """Return the type of each buffer of an ONNX graph's KV cache, by the name of its input: TYPE_FP32.

    Raises:
        RepositoryError: the file cannot be read.
    """
    import onnx  # takes a while, and serving has no need of it

    try:
        inputs = onnx.load(path, load_external_data=False).graph.input
    except Exception as error:  # those of protobuf and of the system share no base class
        raise RepositoryError(f"{path} cannot be read: {error}", remedy="is it an ONNX model?") from error
    names = {value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) for value in inputs}
    return {name: _DATA_TYPES[kind] for name, kind in names.items() if name.startswith("past_key_values.")}


def top1_agreement(path: Path) -> float | None:
    """Return how often a graph ranks the same token first as its source: the share; None: nobody knows."""
    found = read_parity(path.parent).get("top1_agreement")
    return found if isinstance(found, float) else None


# The parameter that says how many threads a forward has, by backend.
_THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What config.pbtxt says of how a logits stage runs."""

    graph: str              # the file in its version's folder: `default_model_filename`
    threads: int            # of one forward: `intra_op_thread_count`
    batch_size: int         # sequences that share a step: `max_batch_size`

    @classmethod
    def of(cls, config: ModelConfig) -> Setting:
        """Return what a config says now."""
        threads = integer_parameter(config.parameters, _THREADS[config.backend], default=0)
        return cls(
            graph=config.default_model_filename,
            threads=threads if threads > 0 else num_cores(),
            batch_size=config.max_batch_size,
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
        parameters={_THREADS[config.backend]: str(setting.threads)} if setting.threads != now.threads else {},
    )


def configured(stage: ModelEntry, setting: Setting) -> ModelEntry:
    """Return the stage as if a setting were written into its config.

    Raises:
        RepositoryError: see `change_to`.
    """
    message = deepcopy(stage.parsed.message)
    change_message(message, change_to(setting, stage))
    return replace(stage, parsed=inspect_message(message, path=stage.parsed.path, folder=stage.path))


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


_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (64, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """All settings that are measured are the combinations of these; each is ascending, without repetition."""

    graphs: tuple[str, ...]
    threads: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]       # tokens that each sequence has behind it, or as many as it can


def make_search_space(
    stage: ModelEntry,
    *,
    batch_sizes: Iterable[int] = (),
    threads: Iterable[int] = (),
    contexts: Iterable[int] = (),
) -> SearchSpace:
    """Return the search space of a logits stage: the graphs of its version folder, and its present setting.

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
    return SearchSpace(
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
