"""Local models: the text models of a repository folder, as commands list and choose them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from genserve.errors import RepositoryError
from genserve.store import default_repository

if TYPE_CHECKING:
    from genserve.repository.index import ModelEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How closely a model's graph agrees with its source, as the export measured it."""

    precision: str
    kv_cache: str  # "float" or "int8"
    top1_agreement: float  # share of positions with the same likeliest token
    perplexity_ratio: float
    divergence: float  # Kullback-Leibler divergence, nats per token


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """One text model of a repository."""

    name: str
    size_bytes: int  # size of the newest version of each stage, in total
    quality: Quality | None  # None: the graph was not exported by genserve
    missing: tuple[str, ...]  # the stages whose folder or file is missing
    base: str | None = None  # the model whose adapter it is; None: it is no adapter


def local_models(repository: Path) -> list[LocalModel]:
    """Return the text models of a repository and their adapters, sorted by name, without loading them.

    Raises:
        RepositoryError: the folder does not exist. A missing store has no models.
    """
    from genserve.repository.index import scan

    if repository == default_repository() and not repository.exists():
        return []
    entries = scan([repository])
    return [
        _describe(entry, entries) if entry.base_model is None else _describe_adapter(entry, entries)
        for entry in entries.values()
        if entry.base_model is not None or _may_generate(entry, entries)
    ]


def _may_generate(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> bool:
    """Whether a model is an ensemble with a tokenizer stage, or with a missing stage that may be one.

    An ensemble with an encoder makes vectors or scores.
    """
    if not entry.is_ensemble or entry.config is None:
        return False
    stages = [entries.get(step.model_name) for step in entry.config.ensemble_steps]
    if any(stage and stage.config and stage.config.is_encoder for stage in stages):
        return False
    return any(stage is None or _is_tokenizer(stage) for stage in stages)


def _is_tokenizer(stage: ModelEntry) -> bool:
    return stage.config is not None and stage.config.backend == "tokenizer"


def _describe(ensemble: ModelEntry, entries: Mapping[str, ModelEntry]) -> LocalModel:
    assert ensemble.config is not None
    names = [step.model_name for step in ensemble.config.ensemble_steps]
    stages = [entries[name] for name in names if name in entries and _has_files(entries[name])]
    present = {stage.name for stage in stages}
    return LocalModel(
        name=ensemble.name,
        size_bytes=sum(size_bytes(stage.latest_version()) for stage in stages),
        quality=next(filter(None, map(_quality, stages)), None),
        missing=tuple(name for name in names if name not in present),
    )


def _describe_adapter(adapter: ModelEntry, entries: Mapping[str, ModelEntry]) -> LocalModel:
    base = adapter.base_model or ""
    needed = {base: base in entries, adapter.name: _has_files(adapter)}
    return LocalModel(
        name=adapter.name,
        size_bytes=size_bytes(adapter.latest_version()) if _has_files(adapter) else 0,
        quality=None,
        missing=tuple(name for name, is_there in needed.items() if not is_there),
        base=adapter.base_model,
    )


def _quality(stage: ModelEntry) -> Quality | None:
    """Return the parity of a stage's graph; None: the stage is not an exported graph."""
    from genserve.textmodel.logits_config import read_parity

    # Read the folder of the configured graph; other graphs of the stage have folders of their own.
    folder = Path(stage.config.default_model_filename).parent if stage.config else Path()
    parity = read_parity(stage.latest_version() / folder)
    try:
        return Quality(
            precision=str(parity["precision"]),
            kv_cache=str(parity.get("kv_cache", "float")),
            top1_agreement=float(parity["top1_agreement"]),
            perplexity_ratio=float(parity["perplexity_ratio"]),
            divergence=float(parity["divergence"]),
        )
    except (KeyError, TypeError, ValueError):  # another tool or an older version wrote the file
        return None


def _has_files(stage: ModelEntry) -> bool:
    # In a fresh clone the version folders have nothing but a .gitkeep.
    try:
        return any(stage.latest_version().glob("[!.]*"))
    except RepositoryError:
        return False


def size_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
