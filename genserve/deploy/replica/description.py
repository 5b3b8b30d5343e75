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
from genserve.textmodel.text_model import TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsDescription:
    """The `LogitsFigures` of a logits stage in another process."""

    max_num_seqs: int
    max_length: int
    vocab_size: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFolder:
    """A stage whose files the ingress reads from its own copy of the repository."""

    model: str
    version: int
    digest: str  # of its files


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDescription:
    """A text model, as far as requests to it are validated without its engine."""

    tokenizer: StageFolder
    decoder: StageFolder
    logits: LogitsDescription
    capacity: int  # sequences that may run and wait
    default_sampling_params: Mapping[str, Any]
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
    """What one replica serves and has to do now."""

    digest: str  # see `digest`
    load: ReplicaLoad
    port: CallPort | None = None    # None: it takes no calls over a port, or no more


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReport:
    """What one replica has done with a version."""

    statistics: ModelStatistics
    num_waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What one replica has done so far.

    Attributes:
        replica: the same in all of its reports, and another one in those of any other replica.
        versions: by name and version.
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


def digest(descriptions: Iterable[VersionDescription]) -> str:
    """Return a value that is the same for replicas whose descriptions are equal."""
    facts = [(one.key, one.config, one.labels, one.text) for one in descriptions]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def stage_path(stages: TextStages, role: str, version: int) -> Path:
    """Return the folder of a version of a stage."""
    return stages[role].path / str(version)


def digest_of_files(folder: Path) -> str:
    """Return a digest of the names and contents of the files in a folder, hidden ones excluded."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in parts):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.relative_to(folder)} {content}\n".encode())
    return digest.hexdigest()


def _text(served: ModelVersion, repository: Repository) -> TextDescription | None:
    model = served.text_model
    stages = repository.text_stages(served.name)
    if model is None or stages is None:
        return None
    return TextDescription(
        tokenizer=_stage(stages, "tokenizer"),
        decoder=_stage(stages, "decoder"),
        logits=_logits(model),
        capacity=model.engine.capacity,
        default_sampling_params=dict(model.default_sampling_params),
        weights_bytes=model.weights_bytes,
    )


def _stage(stages: TextStages, role: str) -> StageFolder:
    folder = stages[role].latest_version()
    return StageFolder(model=stages[role].name, version=int(folder.name), digest=digest_of_files(folder))


def _logits(model: TextModel) -> LogitsDescription:
    logits = model.logits
    return LogitsDescription(
        max_num_seqs=logits.max_num_seqs,
        max_length=logits.max_length,
        vocab_size=logits.vocab_size,
        block_size=logits.block_size,
        num_blocks=logits.num_blocks,
        kv_cache_bytes=logits.kv_cache_bytes,
        metadata=dict(logits.metadata),
    )
