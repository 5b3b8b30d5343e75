"""Local models: which generation models a repository folder holds, and whether their weights are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from genserve.cli.flags import DEFAULT_REPOSITORY
from genserve.errors import RepositoryError
from genserve.repository.index import ModelEntry, scan
from genserve.repository.parity_file import read_parity

__all__ = ["LocalModel", "choose_model", "local_models"]

_DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """One generation model of a repository."""

    name: str
    size_bytes: int                     # of the newest version of each of its stages
    # What the export measured beside its source, as text: precision, top-1 agreement, ratio of perplexities,
    # Kullback-Leibler divergence.
    quality: tuple[str, str, str, str]
    missing: tuple[str, ...]            # the stages that are not there, or have a config and no files


def local_models(repository: Path) -> list[LocalModel]:
    """Return the ensembles of a repository that generate text, by name. Nothing is loaded.

    Raises:
        RepositoryError: the folder is not there.
    """
    entries = scan([repository])
    return [_describe(entry, entries) for entry in entries.values() if _may_generate(entry, entries)]


def choose_model(name: str | None, *, repository: Path) -> str:
    """Return the model to load: the one asked for, or the only one, or the default one.

    Raises:
        RepositoryError: the model has no weights, or there is none at all.
    """
    models = {model.name: model for model in local_models(repository)}
    if name is None:
        name = next(iter(models)) if len(models) == 1 else _DEFAULT_MODEL
    where = "" if repository == DEFAULT_REPOSITORY else f" --model-repository {repository}"
    pull = f"`genserve pull {_DEFAULT_MODEL}{where}`"
    if name not in models:
        known = f"models there: {', '.join(models)}; or " if models else ""
        raise RepositoryError(f"there is no model {name!r} in {repository}", remedy=known + pull)
    if models[name].missing:
        export = f"`genserve export SOURCE --name {name}{where}`"
        raise RepositoryError(
            f"model {name!r} in {repository} has no weights yet: {', '.join(models[name].missing)}",
            remedy=pull if name == _DEFAULT_MODEL else export,
        )
    return name


def _may_generate(entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> bool:
    """Whether it is an ensemble with a tokenizer stage; or with a stage that is missing, which may be it."""
    if not entry.is_ensemble or entry.config is None:
        return False
    stages = [entries.get(step.model_name) for step in entry.config.ensemble_steps]
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
        size_bytes=sum(_size_bytes(stage.latest_version()) for stage in stages),
        quality=next(filter(None, map(_quality, stages)), ("", "", "", "")),
        missing=tuple(name for name in names if name not in present),
    )


def _quality(stage: ModelEntry) -> tuple[str, str, str, str] | None:
    """What lies beside the file that the stage is run from: other graphs have other folders."""
    folder = Path(stage.config.default_model_filename).parent if stage.config else Path()
    parity = read_parity(stage.latest_version() / folder)
    try:
        agreement, ratio = parity["top1_agreement"], parity["perplexity_ratio"]
        numbers = parity["precision"] + ("+kv8" if parity.get("kv_cache") == "int8" else "")
        return numbers, f"{agreement:.1%}", f"x{ratio:.3f}", f"{parity['divergence']:.4f}"
    except (KeyError, TypeError, ValueError):  # a file of somebody else, or of an older export
        return None


def _has_files(stage: ModelEntry) -> bool:
    # A fresh clone of a repository has the folders, each with a .gitkeep, and no weights.
    try:
        return any(stage.latest_version().glob("[!.]*"))
    except RepositoryError:
        return False


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
