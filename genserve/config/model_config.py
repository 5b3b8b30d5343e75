"""Model config: what a config.pbtxt says, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "AllVersions",
    "EnsembleStep",
    "LatestVersions",
    "ModelConfig",
    "SpecificVersions",
    "StateSpec",
    "TensorSpec",
    "VersionPolicy",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output of a model."""

    name: str
    data_type: str              # as in the schema: "TYPE_INT64"
    dims: tuple[int, ...]       # without the batch dimension; -1: any size
    optional: bool = False      # inputs only


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One implicit state of a sequence: an output of one step that is an input of the next."""

    input_name: str
    output_name: str
    data_type: str
    dims: tuple[int, ...]
    same_buffer: bool           # input and output share one buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleStep:
    """One model of an ensemble, and how its tensors are called there."""

    model_name: str
    model_version: int                  # -1: the latest
    input_map: Mapping[str, str]        # the model's name of an input -> the ensemble's name of the tensor
    output_map: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestVersions:
    """Serve the `count` highest versions."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllVersions:
    """Serve every version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecificVersions:
    """Serve these versions."""

    versions: tuple[int, ...]


VersionPolicy = LatestVersions | AllVersions | SpecificVersions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model of the repository."""

    name: str
    platform: str = ""
    backend: str = ""
    max_batch_size: int = 0                 # 0: the model does not batch
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    version_policy: VersionPolicy = LatestVersions(count=1)
    default_model_filename: str = ""        # empty: the backend's own default
    decoupled: bool = False                 # any number of responses to one request
    iterative_sequence: bool = False        # one request is run again and again: continuous batching
    states: tuple[StateSpec, ...] = ()
    ensemble_steps: tuple[EnsembleStep, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
