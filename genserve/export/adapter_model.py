"""Adapter model: makes an adapter of PEFT a model of the repository, which names its base."""

from __future__ import annotations

import shutil
from pathlib import Path

from genserve.errors import ExportError, RepositoryError, suggestion
from genserve.export.model_folders import ModelFolders, writing_into
from genserve.files import staging_folder
from genserve.repository.index import scan
from genserve.repository.repository import Repository
from genserve.repository.text_stages import text_models
from genserve.textmodel.peft_adapter import CONFIG, WEIGHTS


def export_adapter(
    source: Path, *, repository: Path, name: str, base: str, overwrite: bool = False
) -> Path:
    """Make an adapter a model of the repository, and load it once with its base; return its folder.

    Args:
        source: the folder of PEFT, whose files are copied.
        repository: the model repository, which has the base.
        name: the name of the adapter there.
        base: the name of the text model that it is for.
        overwrite: replace an adapter of this name.

    Raises:
        ExportError: the name is taken or not usable, the folder is no adapter, there is no such text model,
            or the adapter does not fit it; the repository is as it was.
    """
    ModelFolders(name)     # rejects other names
    if missing := [file for file in (CONFIG, WEIGHTS) if not (source / file).is_file()]:
        raise ExportError(
            f"{source} has no {missing[0]}", remedy="save the adapter with PEFT's save_pretrained"
        )
    entries = scan([repository])
    if base not in (known := text_models(entries)):
        raise ExportError(
            f"there is no text model {base!r} in {repository}", remedy=suggestion(base, known=known)
        )
    old = entries.get(name)
    if old is not None and not (overwrite and old.base_model):
        raise ExportError(
            f"there is a model {name!r} in {repository} already",
            remedy="--overwrite replaces it" if old.base_model else "take another --name",
        )
    target = repository / name
    with writing_into(repository), staging_folder(repository, "adapter") as staging:
        made = staging / "made" / name
        (made / "1").mkdir(parents=True)
        for file in (CONFIG, WEIGHTS):
            shutil.copy2(source / file, made / "1" / file)     # no link: training writes it in place
        (made / "config.pbtxt").write_text(_config(base), encoding="utf-8")
        _require_fit(made / "1", repository=repository, name=name, base=base)
        if old is not None:
            shutil.move(target, staging / "replaced")
        made.rename(target)
    return target


def _require_fit(folder: Path, *, repository: Path, name: str, base: str) -> None:
    models = Repository([repository])
    try:
        adapters = models.start_text_model(base).adapters
        assert adapters is not None     # the model runs in this process
        adapters.load(name, folder)
    except RepositoryError as error:
        raise ExportError(error.message, remedy=error.remedy) from error
    finally:
        models.close()


def _config(base: str) -> str:
    return (
        "# An adapter: the engine of its base runs it, and requests name it like a model.\n"
        'backend: "adapter"\n'
        f'parameters {{ key: "base_model" value: {{ string_value: "{base}" }} }}\n'
    )
