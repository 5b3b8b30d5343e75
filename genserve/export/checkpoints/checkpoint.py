"""Checkpoint: the weights, configuration and tokenizer of a trained model, from any source."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from genserve.errors import ExportError
from genserve.export.checkpoints.rows import Rows
from genserve.sampling.logits_array import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """The rows of a weight [N, K] as a quantized file has them: blocks of inputs, one row after the other."""

    kind: str                       # one of `BLOCK_FORMATS`, such as "Q4_K"
    rows: Rows[np.uint8]            # [N, bytes of a row]
    inputs: int                     # K
    order: NDArray[np.int32] | None = None      # input i of the rows is input order[i] of the weight
    is_exact: bool = True           # whether they have all numbers as the file has them

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight: [N, K]."""
        return self.rows.shape[0], self.inputs

    @property
    def nbytes(self) -> int:
        """The size in the file."""
        return self.rows.shape[0] * self.rows.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model as its authors published it, in the format of a Hugging Face folder."""

    source: str                             # the name of the folder or file, without the path
    config: Mapping[str, Any]               # config.json
    tensor_names: frozenset[str]
    # Reads a tensor by name, or some rows of it, as float32; each call reads them again.
    load: Callable[[str, slice], FloatArray]
    shape: Callable[[str], tuple[int, ...]] # of a tensor, by name
    tokenizer_files: Mapping[str, bytes]    # by file name: tokenizer.json, tokenizer_config.json ...
    # Reads a weight by name as the file has it; None: it has no quantized format that the kernels execute.
    load_stored: Callable[[str], StoredRows | None] = lambda _name: None
    is_quantized: bool = False              # whether `load_stored` has a weight
    prefers_source: bool = False            # whether these formats are the default of an export
    num_bytes: int = 0                      # the size of the files with its tensors
    # Is told the names of tensors that will not be read again.
    release: Callable[[Collection[str]], None] = lambda _names: None

    def tensor(self, name: str) -> FloatArray:
        """Return a tensor by name, as float32; `NAME[3]` is entry 3 of the first dimension of NAME.

        Raises:
            ExportError: the checkpoint has no such tensor.
        """
        stack, entry = self._found(name)
        if entry is None:
            return self.load(stack, slice(None))
        found: FloatArray = self.load(stack, slice(entry, entry + 1))[0]
        return found

    def rows(self, name: str) -> Rows[np.float32] | None:
        """Return the rows of a matrix by name, as float32; None: the tensor is no matrix.

        Raises:
            ExportError: the checkpoint has no such tensor.
        """
        stack, entry = self._found(name)
        shape = self.shape(stack) if entry is None else self.shape(stack)[1:]
        if len(shape) != 2:
            return None

        def read(start: int, stop: int) -> FloatArray:
            if entry is None:
                return self.load(stack, slice(start, stop))
            return self.tensor(name)[start:stop]

        return Rows((shape[0], shape[1]), read)

    def reporting(self, advance: Callable[[int], None]) -> Self:
        """Return the checkpoint, which reports what is read for the first time, in bytes of its files.

        Once all tensors have been read, `advance` has been called with `num_bytes` in total.
        """
        shapes = {name: self.shape(name) for name in self.tensor_names}
        numbers = sum(map(prod, shapes.values()))
        rows_read: dict[str, int] = {}
        numbers_read = reported = 0

        def report(name: str, stop: int) -> None:
            nonlocal numbers_read, reported
            new = stop - rows_read.get(name, 0)
            if new <= 0:
                return
            rows_read[name] = stop
            numbers_read += new * prod(shapes[name][1:])
            due = numbers_read * self.num_bytes // numbers - reported
            reported += due
            advance(due)

        def load(name: str, rows: slice) -> FloatArray:
            found = self.load(name, rows)
            shape = shapes[name]
            report(name, rows.indices(shape[0])[1] if shape else 1)
            return found

        def load_stored(name: str) -> StoredRows | None:
            stored = self.load_stored(name)
            if stored is None:
                return None

            def read(start: int, stop: int) -> NDArray[np.uint8]:
                found = stored.rows.read(start, stop)
                report(name, stop)
                return found

            return replace(stored, rows=Rows(stored.rows.shape, read))

        return replace(self, load=load, load_stored=load_stored)

    def renamed(self, own_names: Mapping[str, str], **changes: Any) -> Self:
        """Return a checkpoint with the tensors of `own_names`, by their new names, and other changes."""
        needed = dict(own_names)

        def release(names: Collection[str]) -> None:
            released = {needed.pop(name) for name in names if name in needed}
            self.release(released.difference(needed.values()))     # a tensor may have several names

        return replace(
            self,
            tensor_names=frozenset(own_names),
            load=lambda name, rows: self.load(own_names[name], rows),
            shape=lambda name: self.shape(own_names[name]),
            load_stored=lambda name: self.load_stored(own_names.get(name, name)),
            release=release,
            **changes,
        )

    def _found(self, name: str) -> tuple[str, int | None]:
        """Return the name of a tensor, and the entry that `name` means; None: the whole tensor."""
        stack, bracket, entry = name.removesuffix("]").partition("[")
        if stack not in self.tensor_names:
            raise ExportError(
                f"{self.source} has no tensor {stack!r}",
                remedy="the checkpoint is incomplete, or its config names another architecture",
            )
        return stack, int(entry) if bracket else None
