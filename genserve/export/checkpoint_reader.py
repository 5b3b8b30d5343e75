"""Checkpoint reader: opens a Hugging Face folder, a model of its hub, or a GGUF file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genserve.backends.libraries import require_export_packages
from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint
from genserve.export.export_options import HUB_NAME
from genserve.export.gguf_checkpoint import read_gguf
from genserve.sampling.logits_array import FloatArray

if TYPE_CHECKING:
    import torch

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_WANTED = ("config.json", "model*.safetensors", "model.safetensors.index.json", *_TOKENIZER_FILES)
_PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json")


def locate(source: str, *, allow_pickled_weights: bool = False) -> Path:
    """Return the folder or file of a checkpoint: the path `source`, or a download of ORG/NAME from the hub.

    Weights in .bin files are downloaded only with `allow_pickled_weights`.

    Raises:
        MissingDependency: a package is not installed with which a download could be exported.
        ExportError: `source` is neither, or the download failed.
    """
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if not path.exists() and HUB_NAME.fullmatch(source):
        return _download(source, allow_pickled_weights=allow_pickled_weights)
    raise ExportError(
        f"{source!r} is not a checkpoint" + ("" if path.exists() else ": there is no such file or folder"),
        remedy="give a folder with config.json and *.safetensors, a .gguf file, or ORG/NAME on the hub",
    )


def read_checkpoint(path: Path, *, source: str, allow_pickled_weights: bool = False) -> Checkpoint:
    """Open the Hugging Face folder or the GGUF file at `path`; `source` is its name in messages.

    A folder has config.json, tokenizer.json, and weights in safetensors, sharded or not, or in .bin.

    Raises:
        ExportError: a file is missing or broken; or there are only .bin files, and `allow_pickled_weights` is
            not set.
    """
    if not path.is_dir():
        return read_gguf(path, source=source)
    config = _read_json(path / "config.json")
    names, load = _tensors(path, allow_pickled_weights=allow_pickled_weights)
    return Checkpoint(
        source=source,
        config=config,
        tensor_names=frozenset(names),
        load=load,
        tokenizer_files=_tokenizer_files(path, config=config),
    )


def _download(name: str, *, allow_pickled_weights: bool) -> Path:
    """Download the files that an export needs, with the hub's own progress bars and cache; their folder."""
    require_export_packages(f"exporting {name}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_WANTED))
        if allow_pickled_weights and not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=_PICKLED)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ExportError(
            f"{name} could not be downloaded from the Hugging Face hub: {_first_line(error)}",
            remedy="check the name, the network, and HF_TOKEN for a gated model; or export a local folder",
        ) from error
    return folder


def _tensors(
    folder: Path, *, allow_pickled_weights: bool
) -> tuple[Iterable[str], Callable[[str], FloatArray]]:
    index, path = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return _safetensors(_shards(index))
    if path.exists():
        with _open(path) as file:
            return _safetensors(dict.fromkeys(file.keys(), path))
    index, path = folder / "pytorch_model.bin.index.json", folder / "pytorch_model.bin"
    if allow_pickled_weights and (index.exists() or path.exists()):
        tensors = _open_pickled(set(_shards(index).values()) if index.exists() else [path])
        return tensors, lambda name: tensors[name].float().numpy()
    raise ExportError(
        f"{folder} has no model.safetensors",
        remedy="name the folder that has the weights. PyTorch's .bin files are pickles, which have run code "
        "when they were read: `genserve export --allow-pickled-weights` reads them, if you trust the source",
    )


def _shards(index: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ExportError(f"{index} has no weight_map", remedy="download the checkpoint again")
    return {name: index.parent / file for name, file in files.items()}


def _safetensors(files: dict[str, Path]) -> tuple[Iterable[str], Callable[[str], FloatArray]]:
    from safetensors import SafetensorError

    def load(name: str) -> FloatArray:
        with _open(files[name]) as file:
            try:
                array: FloatArray = file.get_tensor(name).float().numpy()
            except SafetensorError as error:    # the index lists a tensor that the shard does not have
                raise _unreadable(files[name], error) from error
            return array

    return files, load


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        # As torch tensors, because numpy has no bfloat16.
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ExportError:
    return ExportError(f"{path} cannot be read: {_first_line(error)}", remedy="download the checkpoint again")


def _open_pickled(files: Iterable[Path]) -> Mapping[str, torch.Tensor]:
    """Map the tensors of PyTorch's .bin files into memory, by name; pickled code is rejected, not run."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not all(isinstance(value, torch.Tensor) for value in loaded.values()):
                raise TypeError("not a tensor")
            tensors |= loaded
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, AttributeError, TypeError) as error:
            raise ExportError(
                f"{path} is broken, or holds more than plain tensors, which could run code when it is read",
                remedy="convert it to safetensors: transformers' from_pretrained(...).save_pretrained(...)",
            ) from error
    return tensors


def _tokenizer_files(folder: Path, *, config: dict[str, Any]) -> dict[str, bytes]:
    files = {name: (folder / name).read_bytes() for name in _TOKENIZER_FILES if (folder / name).is_file()}
    if "tokenizer.json" not in files:
        raise ExportError(
            f"{folder} has no tokenizer.json",
            remedy="make one with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    described = _read_json(folder / "tokenizer_config.json") if "tokenizer_config.json" in files else {}
    template = described.get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next(named, {}).get("template")
    if isinstance(template, str):
        files.setdefault("chat_template.jinja", template.encode())
    eos = {"eos_token_id": config.get("eos_token_id")}
    files.setdefault("generation_config.json", json.dumps(eos).encode())
    files.setdefault("tokenizer_config.json", b"{}")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")    # noqa: TRY004
    except (OSError, ValueError) as error:
        raise ExportError(
            f"{path} cannot be read: {_first_line(error)}",
            remedy="a checkpoint folder has it next to its weights; download it again",
        ) from error
    return value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
