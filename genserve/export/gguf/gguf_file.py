"""GGUF file: reads the metadata and the tensors of a GGUF file.

The reader of the package `gguf` makes a numpy array for every string, which takes seconds for the tokens and
the merges of a vocabulary.

Source: docs/gguf.md in the repository of ggml.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from genserve.sampling.logits_array import FloatArray

_VERSIONS = (2, 3)
_ALIGNMENT = 32     # bytes, if the file does not state it
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# A broken file raises these: its numbers have another type, its alignment is 0, or its arrays nest endlessly.
_BROKEN = (struct.error, LookupError, TypeError, ArithmeticError, RecursionError)

_BLOCKS = 8192      # blocks that are dequantized together, to fit into a processor's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor, which stays in the file until it is read."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    blocks: NDArray[np.uint8]       # [..., bytes of a block], a view of the file

    def rows(self, index: slice | NDArray[np.int64]) -> GgufTensor:
        """Return some of the rows, in any order, in the same number format. A block is within a row."""
        rows = self.blocks.reshape(self.shape[0], -1)[index]
        blocks = rows.reshape(-1, self.blocks.shape[-1])
        return replace(self, shape=(len(rows), *self.shape[1:]), blocks=blocks)

    def read(self) -> FloatArray:
        """Return the tensor as float32, writable."""
        blocks = self.blocks.reshape(-1, self.blocks.shape[-1])
        num_blocks, block = len(blocks), prod(self.shape) // len(blocks)
        values: FloatArray = np.empty((num_blocks, block), np.float32)
        for start in range(0, num_blocks, _BLOCKS):
            part = slice(start, start + _BLOCKS)
            # Pass one row, since the package handles 16 rows at a time.
            values[part] = dequantize(blocks[part].reshape(1, -1), self.kind).reshape(-1, block)
        return values.reshape(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """The content of a file, by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the metadata of a file, and map its tensors; of a file in parts, those of all parts.

        Raises:
            ValueError: the file is not a GGUF file of version 2 or 3, or is broken or incomplete, or is not
                the first of its parts.
            OSError: the file cannot be read, or a part is missing.
        """
        first = cls._open_part(path)
        count = first.metadata.get("split.count", 1)
        if count == 1:
            return first
        ending = f"-00001-of-{count:05}.gguf"
        if not path.name.endswith(ending):
            raise ValueError(f"it is one of {count} parts; the name of the first ends in {ending}")
        stem = path.name.removesuffix(ending)
        tensors = dict(first.tensors)
        for number in range(2, count + 1):
            tensors |= cls._open_part(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")).tensors
        if len(tensors) != first.metadata.get("split.tensors.count", len(tensors)):
            raise ValueError("its parts do not have all tensors")
        return cls(metadata=first.metadata, tensors=tensors)

    @classmethod
    def _open_part(cls, path: Path) -> GgufFile:
        data = np.asarray(np.memmap(path, np.uint8, mode="r"))  # views of a memmap are slow to make
        reader = _Reader(data.data)
        try:
            return cls._read(reader, data)
        except _BROKEN as error:
            raise ValueError(f"it is broken at byte {reader.offset}: {error}") from error

    @classmethod
    def _read(cls, reader: _Reader, data: NDArray[np.uint8]) -> GgufFile:
        if reader.read(4) != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        version = reader.number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; known: {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_entries = reader.number("Q"), reader.number("Q")
        metadata = {reader.string(): reader.value(reader.number("I")) for _ in range(num_entries)}
        headers = [_TensorHeader.read(reader) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = -(-reader.offset // alignment) * alignment
        return cls(metadata=metadata, tensors={head.name: head.tensor(data[start:]) for head in headers})


@dataclass(slots=True)
class _Reader:
    """Reads values of a file one after the other."""

    data: memoryview
    offset: int = 0

    def read(self, size: int) -> bytes:
        end = self.offset + size
        if end > len(self.data):
            raise ValueError("it is incomplete")
        found = bytes(self.data[self.offset : end])
        self.offset = end
        return found

    def number(self, code: str) -> Any:
        [value] = self.numbers(code, 1)
        return value

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.data, self.offset)
        self.offset += struct.calcsize(layout)
        return values

    def string(self) -> str:
        return self.read(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_FORMATS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(count)]
        return list(self.numbers(_FORMATS[kind], count))


@dataclass(frozen=True, slots=True)
class _TensorHeader:
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int                     # in bytes, from the first tensor

    @classmethod
    def read(cls, reader: _Reader) -> _TensorHeader:
        name, num_dims = reader.string(), reader.number("I")
        dims = reader.numbers("Q", num_dims)    # the innermost first
        return cls(name, dims[::-1], GGMLQuantizationType(reader.number("I")), reader.number("Q"))

    def tensor(self, data: NDArray[np.uint8]) -> GgufTensor:
        """Return the tensor from `data`, which has all tensors."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        num_blocks, rest = divmod(prod(self.shape), block)
        found = data[self.offset : self.offset + num_blocks * block_bytes]
        if len(found) != num_blocks * block_bytes or rest or not num_blocks:
            raise ValueError(f"its tensor {self.name!r} is incomplete")
        return GgufTensor(shape=self.shape, kind=self.kind, blocks=found.reshape(num_blocks, block_bytes))
