"""Logits config: the properties of a logits stage's graph that its config and its folder declare."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Any, TypeAlias

from genserve.backends.backend import ModelSource, integer_parameter, model_file
from genserve.config.model_config import ModelConfig, TensorSpec
from genserve.errors import RepositoryError

_FILES: Mapping[str, str] = {"onnxruntime": "model.onnx", "pytorch": "model.pt"}
# Next to a graph: how closely it agrees with its source, by its export.
PARITY_FILE = "parity.json"
# Below it are the blocks of prefixes that `genserve cache build` has computed.
PREFIXES_FOLDER = "prefixes"
# The temperatures of decisions that `genserve calibrate` has fitted.
CALIBRATION_FILE = "calibration.json"
_DEFAULT_LENGTH = 1024  # tokens; a graph without a cache does not say how many it takes


class LengthLimit(StrEnum):
    """What limits the context of a loaded model; the value says how to get a longer one."""

    MODEL = "shorten the prompt"    # it has all that the model itself takes
    FLAG = "raise --max-model-len"
    CONFIG = "raise max_sequence_length in the config.pbtxt of its logits stage"
    KV_CACHE = "raise kv_cache_bytes in the config.pbtxt of its logits stage, or free memory"


class CacheKind(Enum):
    """How a logits stage keeps the keys and values of its tokens, by the states of its config."""

    IN_PLACE = auto()   # written into the same buffer at each step
    GROWING = auto()    # traced graphs copy the cache at each step, with one token more
    NONE = auto()       # no states: every step computes all tokens again


def cache_kind(config: ModelConfig) -> CacheKind:
    """Return how the logits stage of a config keeps its cache."""
    batching = config.sequence_batching
    if batching is None or not batching.iterative or not batching.states:
        return CacheKind.NONE
    # Other iterative models have states too, but no cache of keys and values, or states of layers, in them.
    if not all(state.input_name.startswith(("past_key_values", "past_states")) for state in batching.states):
        return CacheKind.NONE
    if all(state.same_buffer for state in batching.states):
        return CacheKind.IN_PLACE
    return CacheKind.GROWING if config.backend == "onnxruntime" else CacheKind.NONE


def is_logits_stage(config: ModelConfig | None) -> bool:
    """Whether a config belongs to an exported logits graph, whose states are a KV cache."""
    return config is not None and config.backend in _FILES and cache_kind(config) is not CacheKind.NONE


def context_length(config: ModelConfig) -> int:
    """Return the tokens of a sequence by the config of a logits stage; 0: the graph's context.

    Raises:
        RepositoryError: `max_sequence_length` is not a number.
    """
    configured = integer_parameter(config.parameters, "max_sequence_length", default=0)
    return configured or (_DEFAULT_LENGTH if cache_kind(config) is CacheKind.NONE else 0)


def num_pipeline_stages(config: ModelConfig) -> int:
    """Return into how many graphs the layers of a logits stage are cut, by `pipeline_stages` of its config.

    Raises:
        RepositoryError: `pipeline_stages` is not a number.
    """
    return max(1, integer_parameter(config.parameters, "pipeline_stages", default=1))


def pipeline_files(first: Path, *, num_stages: int) -> list[Path]:
    """Return the files of the stages of a pipeline: `model.onnx`, `model.stage2.onnx` and so on."""
    others = (first.with_suffix(f".stage{number}{first.suffix}") for number in range(2, num_stages + 1))
    return [first, *others]


def logits_files(config: ModelConfig, folder: Path) -> list[Path]:
    """Return the files of a logits stage in the folder of its version: one for each stage of a pipeline.

    Raises:
        RepositoryError: a file does not exist, or `pipeline_stages` is not a number.
    """
    first = model_file(
        folder, filename=config.default_model_filename, default=_FILES[config.backend], model=config.name
    )
    files = pipeline_files(first, num_stages=num_pipeline_stages(config))
    for number, file in enumerate(files[1:], 2):
        if not file.is_file():
            raise RepositoryError(
                f"{file} is missing: by `pipeline_stages` of its config, model '{config.name}' is a pipeline "
                f"of {len(files)} stages, and this is stage {number}",
                remedy="copy it there with its weights (.data), or export the model again with "
                f"`genserve export --pipeline-stages {len(files)} --overwrite`",
            )
    return files


def version_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a version in order, without those that do not change what it computes.

    These are hidden files, what Python has compiled, and what was computed with it: prefixes, a calibration.
    """
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_left_out = any(part.startswith(".") or part == "__pycache__" for part in parts)
        is_prefix = parts[0] == PREFIXES_FOLDER and path.suffix == ".kv"
        is_calibration = parts == (CALIBRATION_FILE,)
        if not (is_left_out or is_prefix or is_calibration) and path.is_file():
            yield path


# The path of each file, its size, time of change and inode.
FileStates: TypeAlias = frozenset[tuple[Path, int, int, int]]


def file_states(stages: Mapping[str, ModelSource]) -> FileStates:
    """Return what changes with each file of the stages of a text model that is written or replaced."""
    paths = (path for stage in stages.values() for path in version_files(stage.folder))
    states = ((path, path.stat()) for path in paths)
    return frozenset((path, state.st_size, state.st_mtime_ns, state.st_ino) for path, state in states)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsNames:
    """The names that a config gives the tensors of a model from token ids to logits."""

    input_ids: str
    attention_mask: str | None      # None: the model takes no mask
    logits: str

    @classmethod
    def of(cls, config: ModelConfig) -> LogitsNames:
        """Find the names: the usual ones, or else (`INPUT__0`) the ids first and the mask second.

        Raises:
            RepositoryError: the model takes more than ids and a mask, or has several outputs, none `logits`.
        """
        masks = [spec for spec in config.inputs if "mask" in spec.name] or config.inputs[1:]
        ids = [spec for spec in config.inputs if spec not in masks]
        outputs = [spec for spec in config.outputs if spec.name == "logits"] or config.outputs
        if len(ids) != 1 or len(masks) > 1 or len(outputs) != 1:
            raise RepositoryError(
                f"model '{config.name}' is not a logits stage: its inputs are {_names(config.inputs)}, "
                f"its outputs {_names(config.outputs)}",
                remedy="a logits stage has the inputs `input_ids` and optionally `attention_mask`, and the "
                "output `logits`",
            )
        return cls(
            input_ids=ids[0].name, attention_mask=masks[0].name if masks else None, logits=outputs[0].name
        )


def _names(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(spec.name for spec in specs) or "none"


def read_parity(folder: Path) -> dict[str, Any]:
    """Return the fields of the `export.parity.Parity` of the graph in a folder; empty without such a file."""
    try:
        found = json.loads((folder / PARITY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
