"""Checkpoint reader: opens a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from genserve.errors import ExportError
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.checkpoints.quantized_checkpoint import dequantized, quantization_of
from genserve.export.checkpoints.quantized_formats import TensorReader
from genserve.export.families.exportable import require_exportable
from genserve.export.families.text_part import text_part
from genserve.export.gguf.gguf_checkpoint import read_gguf
from genserve.sampling.logits_array import FloatArray

if TYPE_CHECKING:
    import torch


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def read_checkpoint(
    path: Path, *, source: str, allow_pickled_weights: bool = False, deletes_shards: bool = False
) -> Checkpoint:
    """Open the Hugging Face folder or the GGUF file at `path`; `source` is its name in messages.

    A folder has config.json, tokenizer.json, and weights in safetensors, sharded or not, or in .bin. With
    `deletes_shards` the folder is a download in the hub's cache, from which a shard is deleted once all of
    its tensors are released.

    Raises:
        ExportError: the model cannot be exported; a file is missing or broken; or there are only .bin files,
            and `allow_pickled_weights` is not set.
    """
    if not path.is_dir():
        return read_gguf(path, source=source)
    config = read_config(path)
    require_exportable(config, source=source)
    tensors = _tensors(path, allow_pickled_weights=allow_pickled_weights)
    checkpoint = Checkpoint(
        source=source,
        config=config,
        tensor_names=frozenset(tensors.files),
        load=tensors.load,
        shape=tensors.shape,
        tokenizer_files=_tokenizer_files(path, config=config),
        num_bytes=sum(map(_size, {*tensors.files.values()})),
        release=_deleting(tensors.files) if deletes_shards else lambda _names: None,
    )
    return text_part(checkpoint if quantization_of(config) is None else dequantized(checkpoint, tensors.read))


def _deleting(files: Mapping[str, Path]) -> Callable[[Collection[str]], None]:
    """Return a function that deletes each file once all tensors in it were named."""
    needed: dict[Path, set[str]] = {}
    for name, file in files.items():
        needed.setdefault(file, set()).add(name)

    def release(names: Collection[str]) -> None:
        for file, left in needed.items():
            if left:
                left.difference_update(names)
                if not left:
                    _delete_download(file)

    return release


def _delete_download(file: Path) -> None:
    """Delete a file of a snapshot, and its blob in the hub's cache unless another snapshot has it too."""
    blob = file.resolve()
    file.unlink()
    others = file.parents[1].rglob(file.name)       # the snapshots of other revisions
    if not any(other.resolve() == blob for other in others):
        blob.unlink(missing_ok=True)


class Tensors(NamedTuple):
    """The tensors of a folder; see `Checkpoint` for the functions."""

    files: Mapping[str, Path]   # by the tensors' names
    read: TensorReader
    shape: Callable[[str], tuple[int, ...]]

    def load(self, name: str, rows: slice) -> FloatArray:
        """Return rows of a tensor as float32."""
        # A tensor of a single number has no rows.
        array: FloatArray = self.read(name, () if rows == slice(None) else (rows,)).float().numpy()
        return array


def _tensors(folder: Path, *, allow_pickled_weights: bool) -> Tensors:
    index, path = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return _safetensors(_shards(index))
    if path.exists():
        return open_safetensors_file(path)
    index, path = folder / "pytorch_model.bin.index.json", folder / "pytorch_model.bin"
    if allow_pickled_weights and (index.exists() or path.exists()):
        tensors, files = _open_pickled(set(_shards(index).values()) if index.exists() else [path])
        return Tensors(files, lambda name, at: tensors[name][at], lambda name: tuple(tensors[name].shape))
    raise ExportError(
        f"{folder} has no model.safetensors",
        remedy="name the folder that has the weights. PyTorch's .bin files are pickles, which have run code "
        "when they were read: `genserve export --allow-pickled-weights` reads them, if you trust the source",
    )


def _shards(index: Path) -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's name."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ExportError(f"{index} has no weight_map", remedy="download the checkpoint again")
    return {name: index.parent / file for name, file in files.items()}


def open_safetensors_file(path: Path) -> Tensors:
    """Return the tensors of a safetensors file, which are read when they are needed.

    Raises:
        ExportError: the file cannot be read.
    """
    with _open(path) as file:
        return _safetensors(dict.fromkeys(file.keys(), path))


def _safetensors(files: dict[str, Path]) -> Tensors:
    from safetensors import SafetensorError

    shapes: dict[Path, dict[str, tuple[int, ...]]] = {}     # by file, since opening one takes time

    @contextmanager
    def opened(name: str) -> Iterator[Any]:
        # Opened for each read: the pages of a mapped file count as memory of the process.
        with _open(files[name]) as file:
            try:
                yield file
            except SafetensorError as error:    # the index lists a tensor that the shard does not have
                raise _unreadable(files[name], error) from error

    def read(name: str, at: tuple[slice, ...]) -> torch.Tensor:
        with opened(name) as file:
            tensor: torch.Tensor = file.get_slice(name)[at] if at else file.get_tensor(name)
            return tensor

    @cache  # an export asks for the shape of a tensor before it reads its rows
    def shape(name: str) -> tuple[int, ...]:
        path = files[name]
        if path not in shapes:
            held = [each for each, file in files.items() if file == path]
            with opened(name) as file:
                shapes[path] = {each: tuple(file.get_slice(each).get_shape()) for each in held}
        return shapes[path][name]

    return Tensors(files, read, shape)


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        # Read torch tensors, because numpy has no bfloat16.
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ExportError:
    return ExportError(f"{path} cannot be read: {first_line(error)}", remedy="download the checkpoint again")


def _open_pickled(files: Iterable[Path]) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Path]]:
    """Map the tensors of PyTorch's .bin files into memory; pickled code is rejected, not run.

    Returns:
        The tensors and their files, by name.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, Path] = {}
    for path in files:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not all(isinstance(value, torch.Tensor) for value in loaded.values()):
                raise TypeError("not a tensor")
            tensors |= loaded
            places |= dict.fromkeys(loaded, path)
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, AttributeError, TypeError) as error:
            raise ExportError(
                f"{path} is broken, or holds more than plain tensors, which could run code when it is read",
                remedy="convert it to safetensors: transformers' from_pretrained(...).save_pretrained(...)",
            ) from error
    return tensors, places


def _tokenizer_files(folder: Path, *, config: dict[str, Any]) -> dict[str, bytes]:
    files = present_tokenizer_files(folder)
    if "tokenizer.json" not in files:
        raise ExportError(
            f"{folder} has no tokenizer.json",
            remedy="make one with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    eos = {"eos_token_id": config.get("eos_token_id")}
    files.setdefault("generation_config.json", json.dumps(eos).encode())
    files.setdefault("tokenizer_config.json", b"{}")
    return files


def present_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder that belong to its tokenizer, with the chat template as one of them."""
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    described = read_json(folder / "tokenizer_config.json") if "tokenizer_config.json" in files else {}
    template = described.get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next(named, {}).get("template")
    if isinstance(template, str):
        files.setdefault("chat_template.jinja", template.encode())
    return files


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json, in which transformers writes infinity as {"__float__": "Infinity"}."""

    def number(value: dict[str, Any]) -> Any:
        return float(value["__float__"]) if value.keys() == {"__float__"} else value

    return read_json(folder / "config.json", object_hook=number)


def read_json(path: Path, *, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """Read a JSON object of a checkpoint; raises ExportError if the file is missing or broken."""
    try:
        value: dict[str, Any] = json.loads(path.read_bytes(), object_hook=object_hook)
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")    # noqa: TRY004
    except (OSError, TypeError, ValueError) as error:
        raise ExportError(
            f"{path} cannot be read: {first_line(error)}",
            remedy="a checkpoint folder has it next to its weights; download it again",
        ) from error
    return value


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]
