"""Model config: the values of a config.pbtxt, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"     # the metric whose buckets a config may set
ATTENTION_MASK = "attention_mask"           # the input of an encoder that is 1 for tokens and 0 for padding
POOLINGS = ("mean", "cls", "last", "none")  # of hidden states; "none" keeps them
FIRST_RESPONSE_BUCKETS_MS: tuple[float, ...] = (100.0, 500.0, 2000.0, 5000.0)     # Triton's


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output of a model."""

    name: str
    data_type: str                              # as in the schema: "TYPE_INT64"
    dims: tuple[int, ...]                       # without the batch dimension; -1: any size
    reshape: tuple[int, ...] | None = None      # the shape at the model instead of `dims`
    optional: bool = False                      # inputs only
    allow_ragged_batch: bool = False            # inputs only: requests of different shapes share a batch
    label_filename: str = ""                    # outputs only: in the folder of the model

    @property
    def model_dims(self) -> tuple[int, ...]:
        """The shape at the model, without the batch dimension: `reshape`, or `dims` without one."""
        return self.dims if self.reshape is None else self.reshape


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """An input computed from the batch: sizes and offsets of ragged inputs."""

    kind: str                                   # "BATCH_ELEMENT_COUNT" ...
    target_names: tuple[str, ...]
    source_inputs: tuple[str, ...]
    data_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutput:
    """An output that is split among the requests by the shape of an input."""

    kind: str                                   # "BATCH_SCATTER_WITH_INPUT_SHAPE"
    target_names: tuple[str, ...]
    source_inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A resource of the rate limiter."""

    name: str
    count: int
    is_global: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceClaim:
    """The resources that an instance acquires before it executes."""

    resources: tuple[Resource, ...] = ()
    priority: int = 1                           # 2 runs half as often as 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """Instances of one kind; `normalise.py` resolves KIND_AUTO, and a KIND_GPU without its GPUs."""

    name: str
    kind: str                                   # "KIND_AUTO", "KIND_CPU", "KIND_GPU", "KIND_MODEL"
    count: int = 1
    gpus: tuple[int, ...] = ()
    rate_limiter: ResourceClaim = ResourceClaim()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """Limits of the time and number of waiting requests of one priority."""

    delays: bool = False                        # on a timeout: run it later, instead of rejecting it
    default_timeout_us: int = 0                 # 0: none
    allow_timeout_override: bool = False
    max_queue_size: int = 0                     # 0: any number


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicBatching:
    """Waiting requests are executed in one batch."""

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policy: Mapping[int, QueuePolicy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """An input that gives a model the position of a request in its sequence."""

    name: str
    kind: str                                   # "CONTROL_SEQUENCE_START", "_READY", "_END", "_CORRID"
    data_type: str                              # TYPE_INT32, TYPE_FP32 or TYPE_BOOL; any for CORRID
    false_true: tuple[float, float] = (0, 1)    # not for CORRID


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialState:
    """The value of a state at the start of a sequence."""

    data_type: str
    dims: tuple[int, ...]
    data_file: str = ""                         # in the model's folder `initial_state`; empty: zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One implicit state of a sequence: an output of one step that is an input of the next."""

    input_name: str
    output_name: str
    data_type: str
    dims: tuple[int, ...]
    initial_state: InitialState | None = None
    same_buffer: bool = False                   # input and output share one buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectStrategy:
    """A sequence holds one slot of one instance."""

    max_queue_delay_us: int = 0
    minimum_slot_utilization: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestStrategy:
    """Requests of different sequences are batched dynamically, the oldest first."""

    max_candidate_sequences: int = 0            # 0: max_batch_size
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatching:
    """Requests with the same correlation id are a sequence, and run in order."""

    strategy: DirectStrategy | OldestStrategy = DirectStrategy()
    max_sequence_idle_us: int = 1_000_000
    controls: tuple[Control, ...] = ()
    states: tuple[StateSpec, ...] = ()
    iterative: bool = False                     # one request runs repeatedly: continuous batching


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupInput:
    """One input of a warmup sample."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    source: str                                 # "zero_data", "random_data", or "input_data_file"
    data_file: str = ""                         # in the model's folder `warmup`


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSample:
    """A request to run before the model is ready."""

    name: str
    batch_size: int
    count: int
    inputs: tuple[WarmupInput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleStep:
    """One model of an ensemble, and the names of its tensors there."""

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
    """Serve the listed versions."""

    versions: tuple[int, ...]


VersionPolicy = LatestVersions | AllVersions | SpecificVersions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model of the repository.

    Attributes:
        message: the whole `inference.ModelConfig`; read only. Models and clients are shown the config by it,
            with the fields that have no effect here.
    """

    name: str
    platform: str = ""
    backend: str = ""
    max_batch_size: int = 0                 # 0: the model does not batch
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()
    version_policy: VersionPolicy = LatestVersions(count=1)
    default_model_filename: str = ""        # empty: the backend's own default
    instance_groups: tuple[InstanceGroup, ...] = ()     # empty: one, of KIND_AUTO
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: SequenceBatching | None = None
    decoupled: bool = False                 # any number of responses per request
    ensemble_steps: tuple[EnsembleStep, ...] = ()
    max_inflight_requests: int = 0          # per step of the ensemble; 0: any number
    warmups: tuple[WarmupSample, ...] = ()
    response_cache: bool = False
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    first_response_buckets_ms: tuple[float, ...] = FIRST_RESPONSE_BUCKETS_MS    # bucket bounds
    parameters: Mapping[str, str] = field(default_factory=dict)
    message: Any = field(default=None, repr=False, compare=False)

    @property
    def base_model(self) -> str | None:
        """The text model whose adapter this is; None: it is no adapter."""
        return self.parameters.get("base_model") if self.backend == "adapter" else None

    @property
    def is_encoder(self) -> bool:
        """Whether it is a graph from token ids to vectors or scores, whose rows are padded."""
        return self.backend == "onnxruntime" and "pooling" in self.parameters

    def with_batch(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Return `dims` with the batch dimension, -1, in front if the model batches."""
        return (-1, *dims) if self.max_batch_size > 0 else dims

    def input(self, name: str) -> TensorSpec | None:
        """Return the input of this name, or None."""
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> TensorSpec | None:
        """Return the output of this name, or None."""
        return next((spec for spec in self.outputs if spec.name == name), None)
