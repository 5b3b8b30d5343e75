"""Adapter: the changes of a fine-tuned model, merged into the checkpoint that they were trained on.

LoRA adds `scale * B @ A` to a weight, and DoRA gives the outputs of the sum other norms. An adapter may also
replace whole tensors: biases, norms, the embedding.

Source: Hu et al., "LoRA" (2021); Liu et al., "DoRA" (2024).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Literal, Self

import numpy as np

from genserve.errors import ExportError
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.checkpoints.rows import Rows
from genserve.export.decoder_weights import tensor_sources
from genserve.export.families import family_of
from genserve.export.families.family import Unsupported
from genserve.sampling.logits_array import FloatArray
from genserve.textmodel.peft_adapter import MERGE_WITH_PEFT

logger = logging.getLogger(__name__)

# Reads some rows of a tensor as float32.
ReadRows = Callable[[slice], FloatArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What is added to a matrix [rows, columns]: `left @ right`."""

    left: FloatArray  # [rows, rank], multiplied by the scale
    right: FloatArray  # [rank, columns]
    magnitude: FloatArray | None = None  # DoRA: the norms that rows or columns of the sum get
    magnitude_of: Literal["rows", "columns"] = "rows"

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return self.left.shape[0], self.right.shape[1]

    def added(self, read: ReadRows) -> ReadRows:
        """Return a function that reads the changed matrix, given the one that reads it unchanged."""
        magnitude = self.magnitude

        def total(rows: slice) -> FloatArray:
            changed: FloatArray = read(rows) + self.left[rows] @ self.right
            return changed

        @cache
        def column_factors() -> FloatArray:
            assert magnitude is not None
            parts = Rows(self.shape, lambda start, stop: total(slice(start, stop))).parts()
            norms = np.linalg.norm([np.linalg.norm(part, axis=0) for part in parts], axis=0)
            factors: FloatArray = magnitude / norms
            return factors

        def with_norms(rows: slice) -> FloatArray:
            assert magnitude is not None
            changed = total(rows)
            if self.magnitude_of == "columns":
                return changed * column_factors()
            factors: FloatArray = magnitude[rows] / np.linalg.norm(changed, axis=1)
            return changed * factors[:, None]

        return total if magnitude is None else with_norms


@dataclass(frozen=True, slots=True)
class Difference:
    """What is added to a bias."""

    values: FloatArray  # [outputs]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the bias."""
        return self.values.shape

    def added(self, read: ReadRows) -> ReadRows:
        """Return a function that reads the changed bias, given the one that reads it unchanged."""
        return lambda rows: read(rows) + self.values[rows]


@dataclass(frozen=True, slots=True)
class Replacement:
    """What takes the place of a tensor."""

    shape: tuple[int, ...]
    read: ReadRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter as its authors published it. The names of tensors are those of transformers' model."""

    source: str  # the name of the folder or file, without the path
    base: str = ""  # the model that it states to be made for, for messages
    replaced: Mapping[str, Replacement] = field(default_factory=dict)
    added: Mapping[str, LowRank | Difference] = field(default_factory=dict)  # to what may be replaced
    keeps_tied: bool = False  # whether a tied head changes with the embedding
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)  # that replace those of the model

    def without(self, name: str) -> Self:
        """Return the adapter without the changes of one tensor."""
        replaced = {own: change for own, change in self.replaced.items() if own != name}
        added = {own: low for own, low in self.added.items() if own != name}
        return replace(self, replaced=replaced, added=added)


def merged(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """Return the checkpoint after the changes of an adapter, which are computed when a tensor is read.

    A tied head stays as it is if only the embedding changes, and the other way round, so that the two become
    two tensors; with `keeps_tied` they stay one. Quantized weights that the adapter leaves alone keep their
    formats; if it changes all of them, the result counts as not quantized.

    Args:
        checkpoint: a checkpoint with the names of tensors that transformers' model has.
        adapter: its changes.

    Raises:
        ExportError: the checkpoint lacks a tensor that the adapter changes, or has it with another shape.
    """
    vocabulary = _Vocabulary.of(checkpoint)
    names = adapter.replaced.keys() | adapter.added.keys()
    if vocabulary.is_tied and names & {vocabulary.embedding, vocabulary.head}:
        if adapter.keeps_tied:
            adapter = adapter.without(vocabulary.head)
        else:
            checkpoint = vocabulary.untied(checkpoint)
    resized = vocabulary.resized(checkpoint, adapter)
    _require_known_vocabulary(checkpoint, adapter, vocabulary)
    for name, replacement in adapter.replaced.items():
        _require_shape(checkpoint, adapter, name, replacement.shape, is_resized=name in resized)
    replaced = replace(
        checkpoint,
        load=lambda name, rows: (
            adapter.replaced[name].read(rows) if name in adapter.replaced else checkpoint.load(name, rows)
        ),
        shape=lambda name: (
            adapter.replaced[name].shape if name in adapter.replaced else checkpoint.shape(name)
        ),
    )
    for name, change in adapter.added.items():
        _require_shape(replaced, adapter, name, change.shape)
    readers = {name: change.added(partial(replaced.load, name)) for name, change in adapter.added.items()}
    is_quantized = checkpoint.is_quantized and _keeps_formats(checkpoint, names)
    if checkpoint.is_quantized and not is_quantized:
        logger.warning(
            "%s changes all quantized weights of %s: none keeps its format, and all are quantized again",
            adapter.source,
            checkpoint.source,
        )
    return replace(
        replaced,
        source=f"{checkpoint.source} with {adapter.source}",
        config={**checkpoint.config, "vocab_size": replaced.shape(vocabulary.embedding)[0]}
        if resized
        else checkpoint.config,
        load=lambda name, rows: readers[name](rows) if name in readers else replaced.load(name, rows),
        load_stored=lambda name: None if name in names else checkpoint.load_stored(name),
        is_quantized=is_quantized,
        prefers_source=checkpoint.prefers_source and is_quantized,
        tokenizer_files={**checkpoint.tokenizer_files, **adapter.tokenizer_files},
    )


def _keeps_formats(checkpoint: Checkpoint, changed: Collection[str]) -> bool:
    """Whether a weight that an adapter does not change is quantized."""
    others = (name for name in checkpoint.tensor_names if name not in changed)
    return any(checkpoint.load_stored(name) is not None for name in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """The tensors with a row for each token; without names if the model will be traced."""

    embedding: str = ""
    head: str = ""
    is_tied: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        family = family_of(checkpoint.config)
        try:
            decoder = family.decoder(checkpoint.config) if family else None
        except Unsupported:
            decoder = None
        if family is None or decoder is None:
            return cls()
        sources = tensor_sources({role: family.names[role] for role in ("embedding", "head")}, num_layers=1)
        embedding, head = (f"{each.name_in(checkpoint.tensor_names)}.weight" for each in sources.values())
        return cls(embedding=embedding, head=head, is_tied=decoder.tied)

    def untied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with a head of its own, equal to the embedding."""
        own = {name: name for name in checkpoint.tensor_names} | {self.head: self.embedding}
        return checkpoint.renamed(own, config={**checkpoint.config, "tie_word_embeddings": False})

    def resized(self, checkpoint: Checkpoint, adapter: Adapter) -> Collection[str]:
        """Return the names of the tensors that have another number of tokens in an adapter, if all have."""
        is_one = self.is_tied and adapter.keeps_tied
        names = {self.embedding} if is_one else {self.embedding, self.head}
        if not names <= adapter.replaced.keys():
            return ()
        sizes = {adapter.replaced[name].shape[0] for name in names}
        return names if len(sizes) == 1 and sizes != {checkpoint.shape(self.embedding)[0]} else ()


def _require_known_vocabulary(checkpoint: Checkpoint, adapter: Adapter, vocabulary: _Vocabulary) -> None:
    shapes = [change.shape for change in (*adapter.replaced.values(), *adapter.added.values())]
    if not vocabulary.embedding and any(shape[0] == checkpoint.config.get("vocab_size") for shape in shapes):
        raise ExportError(
            f"the adapter {adapter.source} changes the embedding or the head, which may be one tensor in the "
            f"traced model {checkpoint.source}",
            remedy=MERGE_WITH_PEFT,
        )


def _require_shape(
    checkpoint: Checkpoint, adapter: Adapter, name: str, shape: tuple[int, ...], *, is_resized: bool = False
) -> None:
    made_for = f" ({adapter.base})" if adapter.base else ""
    remedy = f"export the model that the adapter was trained on{made_for}"
    if name not in checkpoint.tensor_names:
        raise ExportError(
            f"the adapter {adapter.source} changes {name!r}, which {checkpoint.source} does not have",
            remedy=remedy,
        )
    found, first = checkpoint.shape(name), 1 if is_resized else 0
    if found[first:] != shape[first:]:
        raise ExportError(
            f"the adapter {adapter.source} changes {name!r} with the shape {list(shape)}; that of "
            f"{checkpoint.source} has {list(found)}",
            remedy=remedy,
        )
