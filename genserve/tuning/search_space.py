"""Search space: the settings of a logits stage to measure, and the config change that each one needs."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from genserve.backends.backend import integer_parameter
from genserve.config.edit import ConfigChange, change_message
from genserve.config.model_config import ModelConfig, OldestStrategy
from genserve.config.parse import config_of
from genserve.errors import RepositoryError
from genserve.machine import default_threads, num_cores
from genserve.repository.index import ModelEntry
from genserve.repository.model_loader import stage_placement
from genserve.textmodel.logits_config import num_pipeline_stages, pipeline_files, read_parity

_DATA_TYPES = {"FLOAT": "TYPE_FP32", "FLOAT16": "TYPE_FP16", "INT8": "TYPE_INT8"}
# The parameter for the number of threads of a forward, by backend.
_THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (64, 512)


def state_types(path: Path) -> dict[str, str]:
    """Return the data types (TYPE_FP32 ...) of an ONNX graph's KV cache buffers, by the names of its inputs.

    Raises:
        RepositoryError: the file cannot be read.
    """
    import onnx  # slow to import, and not needed for serving

    try:
        inputs = onnx.load(path, load_external_data=False).graph.input
    except Exception as error:  # protobuf's and the system's errors share no base class
        raise RepositoryError(
            f"{path} cannot be read: {error}", remedy="check that it is a complete ONNX model"
        ) from error
    names = {value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) for value in inputs}
    return {name: _DATA_TYPES[kind] for name, kind in names.items() if name.startswith("past_key_values.")}


def top1_agreement(path: Path) -> float | None:
    """Return the share of positions where a graph ranks the same token first as its source; None: unknown."""
    found = read_parity(path.parent).get("top1_agreement")
    return found if isinstance(found, float) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The fields of config.pbtxt that are tuned."""

    graph: str              # a file in the version folder: `default_model_filename`
    threads: int            # per forward, or per stage of a pipeline: `intra_op_thread_count`
    batch_size: int         # sequences that share a step: `max_batch_size`

    @classmethod
    def from_config(cls, config: ModelConfig) -> Setting:
        """Return the setting in a config."""
        threads = integer_parameter(config.parameters, _THREADS[config.backend], default=0)
        return cls(
            graph=config.default_model_filename,
            threads=threads if threads > 0 else max(1, default_threads() // num_pipeline_stages(config)),
            batch_size=config.max_batch_size,
        )


def config_change(setting: Setting, stage: ModelEntry) -> ConfigChange:
    """Return the change that writes a setting into the config of a logits stage.

    Raises:
        RepositoryError: the setting has another graph, which cannot be read.
    """
    config = stage.config
    assert config is not None  # a diagnostic was raised otherwise
    current = Setting.from_config(config)
    graph_fields = _graph_fields(stage, config, setting.graph) if setting.graph != current.graph else {}
    threads = {_THREADS[config.backend]: str(setting.threads)} if setting.threads != current.threads else {}
    return ConfigChange(
        fields={
            "max_batch_size": setting.batch_size,
            **_num_candidates(config, setting.batch_size),
            **graph_fields,
        },
        parameters=threads,
    )


def with_setting(stage: ModelEntry, setting: Setting) -> ModelEntry:
    """Return the stage with a setting in its config, in memory.

    Raises:
        RepositoryError: the same as in `config_change`.
    """
    message = deepcopy(stage.parsed.message)
    change_message(message, config_change(setting, stage))
    return replace(stage, parsed=config_of(message, path=stage.parsed.path, folder=stage.path))


def _num_candidates(config: ModelConfig, batch_size: int) -> dict[str, int]:
    oldest = config.sequence_batching.strategy if config.sequence_batching else None
    if not isinstance(oldest, OldestStrategy) or not oldest.max_candidate_sequences:
        return {}   # the default is the batch size
    return {"sequence_batching.oldest.max_candidate_sequences": batch_size}


def _graph_fields(stage: ModelEntry, config: ModelConfig, graph: str) -> dict[str, str]:
    """Return the fields for a graph's file name and the data types of its KV cache."""
    states = config.sequence_batching.states if config.sequence_batching else ()
    types: dict[str, str] = {}
    if config.backend == "onnxruntime":
        file = stage.latest_version() / graph
        for path in pipeline_files(file, num_stages=num_pipeline_stages(config)):
            types |= state_types(path)
    return {"default_model_filename": graph} | {
        f"sequence_batching.state[{index}].data_type": types[state.input_name]
        for index, state in enumerate(states)
        if state.input_name in types
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The values of each field, ascending without duplicates; all combinations are measured."""

    graphs: tuple[str, ...]
    threads: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]       # tokens in the KV cache of each sequence, limited by the context length


def make_search_space(
    stage: ModelEntry,
    *,
    batch_sizes: Iterable[int] = (),
    threads: Iterable[int] = (),
    contexts: Iterable[int] = (),
) -> SearchSpace:
    """Return the search space of a logits stage, which includes all its graphs and its present setting.

    Args:
        stage: the logits stage.
        batch_sizes: the batch sizes to try; empty: powers of two from 1 to 64.
        threads: the numbers of threads to try; empty: the number of cores, a half and a quarter of it; on
            a GPU, the present number.
        contexts: the lengths of context to measure at; empty: 64 and 512.

    Raises:
        RepositoryError: the stage runs one sequence at a time.
    """
    config = stage.config
    assert config is not None  # a diagnostic was raised otherwise
    if config.max_batch_size < 1:
        raise RepositoryError(
            f"model {stage.name!r} has max_batch_size 0, so it cannot batch sequences",
            remedy="export the model again: `genserve export` writes a config with a batch size",
        )
    current = Setting.from_config(config)
    on_gpu = stage_placement(stage).kind == "GPU"
    return SearchSpace(
        graphs=_graphs(stage, current.graph),
        threads=_ascending((*(threads or (() if on_gpu else thread_counts(num_cores()))), current.threads)),
        batch_sizes=_ascending((*(batch_sizes or _BATCH_SIZES), current.batch_size)),
        contexts=_ascending(contexts or _CONTEXTS),
    )


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return the thread counts to measure: all cores, half of them (hyper-threads), and a quarter."""
    return _ascending(max(1, cores // part) for part in (1, 2, 4))


def _graphs(stage: ModelEntry, current: str) -> tuple[str, ...]:
    """Return the current graph and the graphs in subfolders: `model.onnx`, `int4/model.onnx`."""
    folder, file = stage.latest_version(), Path(current).name
    found = (path.relative_to(folder).as_posix() for path in (*folder.glob(file), *folder.glob(f"*/{file}")))
    return tuple(sorted({current, *found}))


def _ascending(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))
