"""Checkpoint reader: opens a Hugging Face folder, a model of its hub, or a GGUF file."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint, FloatArray
from genserve.export.gguf_checkpoint import read_gguf

__all__ = ["download", "locate", "open_pickled", "read_checkpoint", "read_folder"]


def open_pickled(files: Iterable[Path]) -> Mapping[str, torch.Tensor]:
    """The tensors of some .bin files by name, mapped into memory and read when they are looked at.

    Raises:
        ExportError: a file is broken, has more than tensors in it, or is of before PyTorch 1.6.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not all(isinstance(value, torch.Tensor) for value in loaded.values()):
                raise TypeError("what is not a tensor is no weight")
            tensors |= loaded
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, AttributeError, TypeError) as error:
            raise ExportError(
                f"{path} is broken, or holds more than plain tensors, which could run code when it is read",
                remedy="convert it to safetensors: transformers' from_pretrained(...).save_pretrained(...)",
            ) from error
    return tensors


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_WANTED = ("config.json", "model*.safetensors", "model.safetensors.index.json", *_TOKENIZER_FILES)
_PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json")


def download(name: str) -> Path:
    """Download what an export needs of ORG/NAME, with the hub's own progress bars and cache; the folder.

    Raises:
        ExportError: the hub is out of reach, or has no such model for this caller.
    """
    try:
        folder = Path(snapshot_download(name, allow_patterns=_WANTED))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=_PICKLED)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ExportError(
            f"{name} could not be downloaded from the Hugging Face hub: {_first_line(error)}",
            remedy="check the name, the network, and HF_TOKEN for a gated model; or export a local folder",
        ) from error
    return folder


def read_folder(folder: Path, *, source: str) -> Checkpoint:
    """Open a folder with config.json, tokenizer.json, and weights in safetensors or .bin, sharded or not.

    Raises:
        ExportError: a file is missing or broken.
    """
    config = _read_json(folder / "config.json")
    names, load = _tensors(folder)
    return Checkpoint(
        source=source,
        config=config,
        tensor_names=frozenset(names),
        load=load,
        tokenizer_files=_tokenizer_files(folder, config=config),
    )


def _tensors(folder: Path) -> tuple[Iterable[str], Callable[[str], FloatArray]]:
    index, path = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return _safetensors(_places(index))
    if path.exists():
        with _open(path) as file:
            return _safetensors(dict.fromkeys(file.keys(), path))
    index, path = folder / "pytorch_model.bin.index.json", folder / "pytorch_model.bin"
    if index.exists() or path.exists():
        tensors = open_pickled(set(_places(index).values()) if index.exists() else [path])
        return tensors, lambda name: tensors[name].float().numpy()
    raise ExportError(f"{folder} has no model.safetensors", remedy="is this the folder that has the weights?")


def _places(index: Path) -> dict[str, Path]:
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ExportError(f"{index} has no weight_map", remedy="download the checkpoint again")
    return {name: index.parent / file for name, file in places.items()}


def _safetensors(places: dict[str, Path]) -> tuple[Iterable[str], Callable[[str], FloatArray]]:
    def load(name: str) -> FloatArray:
        with _open(places[name]) as file:
            try:
                array: FloatArray = file.get_tensor(name).float().numpy()
            except SafetensorError as error:    # the index promises what the shard has not
                raise _unreadable(places[name], error) from error
            return array

    return places, load


def _open(path: Path) -> Any:
    try:
        # As torch tensors: numpy knows no bfloat16.
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ExportError:
    return ExportError(f"{path} cannot be read: {_first_line(error)}", remedy="download the checkpoint again")


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
            raise ValueError("it is no JSON object")    # noqa: TRY004
    except (OSError, ValueError) as error:
        raise ExportError(
            f"{path} cannot be read: {_first_line(error)}",
            remedy="a checkpoint folder has it beside its weights; download it again",
        ) from error
    return value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def locate(source: str) -> Path:
    """The folder or file of a checkpoint: that of this path, or a download of ORG/NAME from the hub.

    Raises:
        ExportError: there is nothing of the kind at `source`, or the download failed.
    """
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if not path.exists() and _HUB_NAME.fullmatch(source):
        return download(source)
    raise ExportError(
        f"{source!r} is no checkpoint",
        remedy="give a folder with config.json and *.safetensors, a .gguf file, or ORG/NAME on the hub",
    )


def read_checkpoint(path: Path, *, source: str) -> Checkpoint:
    """Open the Hugging Face folder or the GGUF file at `path`; `source` is its name for messages.

    Raises:
        ExportError: it cannot be read.
    """
    if path.is_dir():
        return read_folder(path, source=source)
    return read_gguf(path, source=source)
