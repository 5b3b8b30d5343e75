"""Adapter model: makes an adapter a model of the repository, which names its base."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from genserve.errors import ExportError, RepositoryError, suggestion
from genserve.export.model_folders import ModelFolders, writing_into
from genserve.files import staging_folder
from genserve.repository.index import scan
from genserve.repository.repository import Repository
from genserve.repository.text_stages import text_models
from genserve.textmodel.peft_adapter import CONFIG, WEIGHTS
from genserve.textmodel.runtimes.adapter_targets import num_layers
from genserve.textmodel.runtimes.onnx_logits import LogitsGraph
from genserve.textmodel.text_model import TextModel


def export_adapter(
    source: Path, *, repository: Path, name: str, base: str, overwrite: bool = False
) -> Path:
    """Make an adapter a model of the repository, and load it once with its base; return its folder.

    Args:
        source: the folder of PEFT, whose files are copied, or a GGUF file.
        repository: the model repository, which has the base.
        name: the name of the adapter there.
        base: the name of the text model that it is for.
        overwrite: replace an adapter of this name.

    Raises:
        ExportError: the name is taken or not usable, the folder is no adapter, there is no such text model,
            or the adapter does not fit it; the repository is as it was.
    """
    ModelFolders(name)     # rejects other names
    if source.suffix == ".safetensors":
        raise ExportError(f"{source} is one of the files of an adapter", remedy="give the folder that has it")
    is_gguf = source.is_file()
    if not is_gguf and (missing := [file for file in (CONFIG, WEIGHTS) if not (source / file).is_file()]):
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
        (made / "config.pbtxt").write_text(_config(base), encoding="utf-8")
        with _started(base, repository=repository) as model:
            assert model.adapters is not None   # the model runs in this process
            if is_gguf:
                _convert(source, made / "1", base=model, graphs=model.adapters.packer.graphs())
            model.adapters.load(name, made / "1" if is_gguf else source)
        if not is_gguf:
            for file in (CONFIG, WEIGHTS):
                shutil.copy2(source / file, made / "1" / file)  # no link: training writes it in place
        if old is not None:
            shutil.move(target, staging / "replaced")
        made.rename(target)
    return target


@contextmanager
def _started(base: str, *, repository: Path) -> Iterator[TextModel]:
    """Run a model of the repository; its errors with an adapter become those of an export."""
    models = Repository([repository])
    try:
        yield models.start_text_model(base)
    except RepositoryError as error:
        raise ExportError(error.message, remedy=error.remedy) from error
    finally:
        models.close()


def _convert(path: Path, folder: Path, *, base: TextModel, graphs: Sequence[LogitsGraph]) -> None:
    """Convert the adapter in a GGUF file to PEFT's format."""
    from genserve.export.adapters.gguf_adapter import convert_gguf_adapter

    targets = {role: target for graph in graphs for role, target in graph.adapter_targets.items()}
    (num_kv_heads, head_dim, *_), _ = next(iter(graphs[0].token_shapes.values()))
    query = next(target for role, target in targets.items() if role.endswith("attention.query"))
    convert_gguf_adapter(
        path,
        folder,
        base=base.name,
        family=base.logits.metadata["genserve.family"],
        config={
            "num_hidden_layers": num_layers(targets),
            "num_attention_heads": query.num_outputs // head_dim,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
        },
    )


def _config(base: str) -> str:
    return (
        "# An adapter: the engine of its base runs it, and requests name it like a model.\n"
        'backend: "adapter"\n'
        f'parameters {{ key: "base_model" value: {{ string_value: "{base}" }} }}\n'
    )
