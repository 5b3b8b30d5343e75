"""Description: what an ingress needs to know of the models of a replica, and how they fare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric

from genserve.deploy.calls.call_protocol import CallPort
from genserve.deploy.replica.replica_load import ReplicaLoad
from genserve.inference_statistics import ModelStatistics
from genserve.repository.model_versions import ModelVersion
from genserve.repository.repository import Repository
from genserve.repository.text_stages import TextStages
from genserve.textmodel.logits_config import LengthLimit, version_files
from genserve.textmodel.text_model import TextModel

# The digest of a larger file has so many pieces of this size, spread over the file: to read all of large
# weights would take as long as to load them.
_NUM_PIECES = 64
_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """How much the engine of a text model holds in one replica.

    Replicas of one version may differ, since the KV cache takes a share of the memory that is free.

    Attributes:
        max_num_seqs, max_length, context_length, length_limit, block_size, num_blocks, kv_cache_bytes: see
            `LogitsFigures`.
        capacity: sequences that may run and wait.
    """

    max_num_seqs: int
    max_length: int
    context_length: int
    length_limit: LengthLimit
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFolder:
    """The version of a stage, whose files the ingress has in its own copy of the repository."""

    model: str
    version: int
    digest: str  # stands for the contents of its files


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDescription:
    """A text model, as far as requests to it are validated without its engine."""

    tokenizer: StageFolder
    decoder: StageFolder
    logits: StageFolder
    decoder_parameters: Mapping[str, str]  # the parameters in the decoder stage's config
    vocab_size: int
    metadata: Mapping[str, str]  # the metadata of the logits stage's file
    default_sampling_params: Mapping[str, Any]
    temperatures: Mapping[str, float]  # see `TextModel.temperatures`
    weights_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDescription:
    """A version of a model that a replica serves."""

    name: str
    version: int
    config: bytes  # the normalised message
    labels: Mapping[str, Sequence[str]]
    load_s: float = field(compare=False)
    text: TextDescription | None  # None: not a text model

    @property
    def key(self) -> tuple[str, int]:
        """Name and version."""
        return self.name, self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """What one replica serves and has to do now.

    Attributes:
        identity: see `identity_of`.
        load: how much the replica has to do.
        sizes: the sizes of its engines, by the names of the text models.
        num_turns: steps that its engines have begun.
        is_ready: False: an engine hangs or has died.
        port: the port at which the replica takes calls; None: it takes none, or stops.
        is_stopping: whether the replica should get calls only while no other replica has its identity.
    """

    identity: str
    load: ReplicaLoad
    sizes: Mapping[str, EngineSizes] = field(default_factory=dict)
    num_turns: int = 0
    is_ready: bool = True
    port: CallPort | None = None
    is_stopping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReport:
    """What one replica has done with a version."""

    statistics: ModelStatistics
    num_waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What one replica has done so far.

    Attributes:
        replica: an id that all reports of the replica have, and no report of another replica.
        versions: the counts of each version, by the model's name and the version.
        metrics: the families of its registry.
    """

    replica: str
    versions: Mapping[tuple[str, int], VersionReport]
    metrics: Sequence[Metric]


def describe(repository: Repository) -> list[VersionDescription]:
    """Return the versions that a repository serves."""
    return [
        VersionDescription(
            name=served.name,
            version=served.version,
            config=served.config.message.SerializeToString(deterministic=True),
            labels=dict(served.labels),
            load_s=served.load_s,
            text=_text(served, repository),
        )
        for served in repository.served
    ]


def identity_of(descriptions: Iterable[VersionDescription]) -> str:
    """Return a value that is the same for replicas whose descriptions are equal.

    Any of these replicas may take a call that was made for another one, or continue its answer: they have the
    same tokenizer, template, graph and configs.
    """
    facts = [(one.key, one.config, one.labels, one.text) for one in descriptions]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def engine_sizes(repository: Repository) -> dict[str, EngineSizes]:
    """Return the sizes of the engines of a repository, by the names of the text models."""
    return {model.name: _sizes(model) for model in repository.text_models}


def stage_path(stages: TextStages, role: str, version: int) -> Path:
    """Return the folder of a version of a stage."""
    return stages[role].path / str(version)


def digest_of_files(folder: Path) -> str:
    """Return a digest of the names and contents of the files of a version; see `version_files`.

    For a file of more than 16 MiB it covers the size, and pieces of the content.
    """
    digest = hashlib.sha256()
    for path in version_files(folder):
        digest.update(f"{path.relative_to(folder)} {_digest_of_file(path)}\n".encode())
    return digest.hexdigest()


def _digest_of_file(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _NUM_PIECES * _PIECE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for number in range(_NUM_PIECES):
            file.seek(number * (size - _PIECE_BYTES) // (_NUM_PIECES - 1))
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def _text(served: ModelVersion, repository: Repository) -> TextDescription | None:
    model = served.text_model
    stages = repository.text_stages(served.name)
    if model is None or stages is None:
        return None
    decoder = stages["decoder"].config
    return TextDescription(
        tokenizer=_stage(stages, "tokenizer"),
        decoder=_stage(stages, "decoder"),
        logits=_stage(stages, "logits"),
        decoder_parameters=dict(decoder.parameters) if decoder else {},
        vocab_size=model.logits.vocab_size,
        metadata=dict(model.logits.metadata),
        default_sampling_params=dict(model.default_sampling_params),
        temperatures=dict(model.temperatures),
        weights_bytes=model.weights_bytes,
    )


def _stage(stages: TextStages, role: str) -> StageFolder:
    folder = stages[role].latest_version()
    return StageFolder(model=stages[role].name, version=int(folder.name), digest=digest_of_files(folder))


def _sizes(model: TextModel) -> EngineSizes:
    logits = model.logits
    return EngineSizes(
        max_num_seqs=logits.max_num_seqs,
        max_length=logits.max_length,
        context_length=logits.context_length,
        length_limit=logits.length_limit,
        block_size=logits.block_size,
        num_blocks=logits.num_blocks,
        kv_cache_bytes=logits.kv_cache_bytes,
        capacity=model.engine.capacity,
    )
