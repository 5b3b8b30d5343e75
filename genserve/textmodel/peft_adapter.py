"""PEFT adapter: reads a LoRA adapter as PEFT saves it: its low-rank products, by the modules they change."""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genserve.errors import RepositoryError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# The tensors of a module with an adapter.
LOW_RANK = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(?:\.weight)?"
)
# Fields of adapter_config.json that make a module compute something else than its low-rank product.
_OTHER_PRODUCTS = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config",
    "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora",
)  # fmt: skip
# Initializations that leave the weights of the model as they are.
_INITIALIZATIONS = (None, True, False, "eva", "gaussian", "orthogonal")

_TYPES: Mapping[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as its own reader limits it


def other_product(config: Mapping[str, Any]) -> str | None:
    """Return a field of adapter_config.json by which modules compute something else; None: there is none."""
    return next((name for name in _OTHER_PRODUCTS if config.get(name)), None)


def changes_model(config: Mapping[str, Any]) -> bool:
    """Whether the adapter was initialized in a way that changes the weights of the model too."""
    return config.get("init_lora_weights") not in _INITIALIZATIONS


def scale_of(module: str, rank: int, *, config: Mapping[str, Any]) -> np.float32:
    """Return the factor of a module's low-rank product: Hu et al. (2021), or Kalajdzievski (2023).

    Raises:
        AttributeError, KeyError, TypeError, re.error: the config is not as PEFT writes it.
    """
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    own = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    alpha: float = next(own, config["lora_alpha"])
    return np.float32(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


@dataclass(frozen=True, slots=True)
class LowRankProduct:
    """`up @ down` is added to the weight of a module."""

    down: NDArray[np.float32]  # [rank, inputs]
    up: NDArray[np.float32]  # [outputs, rank], multiplied by the scale


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Where the numbers of a tensor are in a file."""

    dtype: type[np.generic]
    shape: tuple[int, ...]
    offset: int  # bytes


class PeftAdapter:
    """The files of an adapter, whose tensors are read when they are needed.

    Attributes:
        config: the fields of adapter_config.json.
        modules: the names of the modules that it changes, in transformers' model.
    """

    def __init__(self, folder: Path) -> None:
        """Open an adapter that consists of low-rank products alone.

        Raises:
            RepositoryError: the folder has no adapter, or one that does something else too.
        """
        self._folder = folder
        self.config = _read_config(folder)
        self._tensors = _open_safetensors(folder / WEIGHTS)
        self.modules: dict[str, dict[str, str]] = {}  # the tensors' names in the file, by part
        for name in self._tensors:
            match = LOW_RANK.fullmatch(name.removeprefix(PREFIX))
            if match is None:
                raise _unsupported(folder, f"replaces {name.removeprefix(PREFIX)}")
            if match["part"] not in ("lora_A.weight", "lora_B.weight"):
                raise _unsupported(folder, f"has {match['part']} for {match['module']}")
            self.modules.setdefault(match["module"], {})[match["part"]] = name
        if not self.modules:
            raise RepositoryError(f"{folder / WEIGHTS} has no tensors of an adapter", remedy=_SAVE)

    def shape(self, module: str) -> tuple[int, int, int]:
        """Return the outputs, the rank and the inputs of a module's product.

        Raises:
            RepositoryError: it does not have two matrices of one rank.
        """
        shapes = [
            self._tensors[name].shape for part in ("A", "B") if (name := self._name(module, part)) is not None
        ]
        is_whole = len(shapes) == 2 and {len(shape) for shape in shapes} == {2}
        if not is_whole or not shapes[0][0] or shapes[0][0] != shapes[1][1]:
            raise RepositoryError(
                f"{self._folder / WEIGHTS} does not have two matrices of the same rank for {module!r}",
                remedy="save the adapter again; distributed training must gather its parts first",
            )
        (rank, inputs), (outputs, _) = shapes
        return outputs, rank, inputs

    def product(self, module: str) -> LowRankProduct:
        """Read the product of a module.

        Raises:
            RepositoryError: it has numbers that are not finite, the config does not state its scale, or the
                file was shortened or removed since it was opened.
        """
        _, rank, _ = self.shape(module)
        down, up = (self._read(self._name(module, part)) for part in ("A", "B"))
        try:
            scale = scale_of(module, rank, config=self.config)
        except (ArithmeticError, AttributeError, KeyError, TypeError, re.error) as error:
            raise RepositoryError(
                f"{self._folder / CONFIG} does not state lora_alpha or alpha_pattern as PEFT writes them",
                remedy="download the adapter again",
            ) from error
        if not (np.isfinite(down).all() and np.isfinite(up).all() and np.isfinite(scale)):
            raise RepositoryError(
                f"{self._folder / WEIGHTS} has numbers that are not finite for {module!r}",
                remedy="train the adapter with a lower learning rate, or take an earlier checkpoint of it",
            )
        return LowRankProduct(down, up * scale)

    def _name(self, module: str, part: str) -> str | None:
        return self.modules[module].get(f"lora_{part}.weight")

    def _read(self, name: str | None) -> NDArray[np.float32]:
        assert name is not None  # `shape` has found it
        stored, path = self._tensors[name], self._folder / WEIGHTS
        count = math.prod(stored.shape)
        try:
            # Not mapped: to read what was cut off from a mapped file ends the process (SIGBUS).
            values = np.fromfile(path, stored.dtype, count, offset=stored.offset)
        except OSError as error:
            raise _unreadable(path, error) from error
        if len(values) < count:
            raise _unreadable(path, f"it was shortened, and ends before the end of {name}")
        values = values.reshape(stored.shape)
        if values.dtype == np.uint16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32, copy=False)


MERGE_WITH_PEFT = "merge it with PEFT, and export the folder with the merged model"
MERGE_REMEDY = "merge it into the model: `genserve export MODEL --adapter FOLDER`"
_SAVE = f"give a folder of PEFT's save_pretrained, with {CONFIG} and {WEIGHTS}"


def _unsupported(folder: Path, what: str) -> RepositoryError:
    return RepositoryError(
        f"the adapter in {folder} {what}, which a request cannot choose", remedy=MERGE_REMEDY
    )


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RepositoryError(f"{folder} is not an adapter: it has no {CONFIG}", remedy=_SAVE) from error
    except ValueError as error:
        raise RepositoryError(f"{path} is not JSON: {error}", remedy="download the adapter again") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise RepositoryError(
            f"{folder} has an adapter of the type {kind}; a request can choose LoRA adapters only",
            remedy=MERGE_WITH_PEFT,
        )
    if config.get("use_dora"):
        raise _unsupported(folder, "is a DoRA adapter")
    if (field := other_product(config)) is not None:
        raise RepositoryError(
            f"the adapter in {folder} has {field}, which a request cannot choose", remedy=MERGE_WITH_PEFT
        )
    if changes_model(config):
        raise RepositoryError(
            f"the adapter in {folder} was initialized by {config['init_lora_weights']!r}, which changes the "
            "model too",
            remedy="save it with path_initial_model_for_weight_conversion of PEFT, for a plain LoRA",
        )
    return config


def _unreadable(path: Path, problem: Exception | str) -> RepositoryError:
    return RepositoryError(
        f"{path} cannot be read: {problem}", remedy="download the adapter again, or save it in float32"
    )


def _open_safetensors(path: Path) -> dict[str, _StoredTensor]:
    """Return where the tensors of a file are; the numbers of bfloat16 are read as uint16.

    Raises:
        RepositoryError: the file is missing or broken, or has tensors of another type.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes")
            header = json.loads(file.read(size))
            num_bytes = file.seek(0, os.SEEK_END)
        return dict(_tensors(header, first=8 + size, last=num_bytes))
    except FileNotFoundError as error:
        raise RepositoryError(f"{path.parent} has no {path.name}", remedy=_SAVE) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from error


def _tensors(header: Mapping[str, Any], *, first: int, last: int) -> Iterator[tuple[str, _StoredTensor]]:
    """Yield the tensors of a header, by name; their numbers are between two offsets of the file."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _TYPES:
            raise ValueError(f"{name} has the type {entry['dtype']}")
        dtype, shape = _TYPES[entry["dtype"]], tuple(map(operator.index, entry["shape"]))
        start, end = map(operator.index, entry["data_offsets"])
        if not 0 <= start <= end <= last - first:
            raise ValueError(f"{name} is beyond the end of the file")
        if min(shape, default=0) < 0 or math.prod(shape) * np.dtype(dtype).itemsize != end - start:
            raise ValueError(f"{name} has {end - start} bytes, which are not those of the shape {[*shape]}")
        yield name, _StoredTensor(dtype, shape, first + start)
