"""Setting: one way to run a logits stage, and what it changes in the config."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

from genserve.backends.onnx_session import num_cores
from genserve.backends.parameters import integer_parameter
from genserve.config.edit import ConfigChange, change_message
from genserve.config.model_config import ModelConfig, OldestStrategy
from genserve.config.parse import inspect_message
from genserve.repository.index import ModelEntry
from genserve.tuning.graph import state_types

__all__ = ["Setting", "change_to", "configured"]

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
