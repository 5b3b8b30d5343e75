"""Encoder: runs batches of texts of different lengths, and makes a vector of the hidden states of each.

Rows are padded to the longest of their run, and an attention mask tells them from their padding. The
parameters of the model say how hidden states become a vector: `pooling` and `normalize`, or for the scores of
a classifier `sigmoid`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genserve.backends.backend import boolean_parameter
from genserve.config.model_config import ATTENTION_MASK, POOLINGS, ModelConfig
from genserve.errors import InferenceError, RepositoryError
from genserve.inference import Inference, InferenceResponse
from genserve.sampling.logits_array import FloatArray
from genserve.tensor import DataType, Tensor

# From the inputs and the names of the wanted outputs to at least these outputs.
RunFunction: TypeAlias = Callable[[Mapping[str, Tensor], Sequence[str]], Mapping[str, Tensor]]

# How many times the tokens of a run may be computed, padding included. Each run has costs of its own.
_MAX_PADDING = 1.15
_SMALL_RUN = 64     # tokens, padding included: below that, padding costs less than another run


class EncoderRunner:
    """Runs the batches of an encoder; the instances of a model share one. See `BatchRunner`."""

    def __init__(self, config: ModelConfig) -> None:
        """Read the parameters of the model.

        Raises:
            RepositoryError: a parameter has another value.
        """
        self._pooling = config.parameters["pooling"]
        if self._pooling not in POOLINGS:
            raise RepositoryError(
                f"failed to convert pooling '{self._pooling}' to kind of pooling",
                remedy=f"set the parameter pooling in config.pbtxt to one of {', '.join(POOLINGS)}",
            )
        self._normalizes = boolean_parameter(config.parameters, "normalize", default=False)
        self._maps_scores = boolean_parameter(config.parameters, "sigmoid", default=False)
        self._has_mask = config.input(ATTENTION_MASK) is not None
        self._types = {spec.name: DataType.from_config_name(spec.data_type) for spec in config.outputs}

    def execute(self, batch: Sequence[Inference], *, run: RunFunction) -> None:
        """Run a network for a batch, in groups of texts of similar lengths, and send the responses.

        A request that the network rejects, such as one with unknown token ids, fails alone.
        """
        for group in self._groups([inference for inference in batch if _is_rectangular(inference)]):
            try:
                self._execute(group, run)
            except InferenceError as error:
                if len(group) == 1:
                    group[0].fail(error)
                    continue
                for inference in group:
                    self.execute([inference], run=run)

    def _execute(self, group: Sequence[Inference], run: RunFunction) -> None:
        inputs, mask = self._joined(group)
        outputs = run(inputs, tuple(self._types))
        pooled = {name: self._pooled(outputs[name].array, mask) for name in self._types}
        first = 0
        for inference in group:
            rows, length = _shape(inference)
            wanted = inference.request.requested_outputs or self._types
            parts = [
                self._part(name, pooled[name][first : first + rows], length)
                for name in sorted(self._types)
                if name in wanted
            ]
            inference.send(InferenceResponse(outputs=tuple(parts)), final=True)
            first += rows

    def _groups(self, batch: Sequence[Inference]) -> Iterator[list[Inference]]:
        """Yield the requests that run together: they have similar lengths, since padding is computed too."""
        group: list[Inference] = []
        num_rows = num_tokens = 0
        for inference in sorted(batch, key=lambda one: _shape(one)[1]):
            rows, length = _shape(inference)
            padded, filled = (num_rows + rows) * length, num_tokens + rows * length
            if group and padded > max(_MAX_PADDING * filled, _SMALL_RUN):
                yield group
                group, num_rows, num_tokens = [], 0, 0
            group.append(inference)
            num_rows, num_tokens = num_rows + rows, num_tokens + rows * length
        if group:
            yield group

    def _joined(self, group: Sequence[Inference]) -> tuple[dict[str, Tensor], NDArray[Any]]:
        """Return the inputs of a run, and its mask [rows, length]."""
        length = max(_shape(inference)[1] for inference in group)
        inputs = {}
        for name, first in group[0].inputs.items():
            arrays = [_padded(inference, name, length) for inference in group]
            array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            inputs[name] = Tensor(name, np.ascontiguousarray(array), data_type=first.data_type)
        shape = sum(_shape(inference)[0] for inference in group), length
        return inputs, inputs[ATTENTION_MASK].array if self._has_mask else np.ones(shape, np.int64)

    def _pooled(self, output: NDArray[Any], mask: NDArray[Any]) -> NDArray[Any]:
        """Return the vectors [rows, size] of hidden states [rows, length, size], or any other output."""
        if output.dtype.kind != "f":
            return output
        values = output.astype(np.float32, copy=False)
        if output.ndim == 3 and self._pooling != "none":
            values = pool(values, mask, self._pooling)
        if self._normalizes:
            values = normalized(values)
        if self._maps_scores:
            values = (1 / (1 + np.exp(-values))).astype(np.float32)
        return values.astype(output.dtype, copy=False)

    def _part(self, name: str, rows: NDArray[Any], length: int) -> Tensor:
        if rows.ndim == 3:
            rows = rows[:, :length]     # without the padding of its run
        return Tensor(name, np.ascontiguousarray(rows), data_type=self._types[name])


def pool(hidden: FloatArray, mask: NDArray[Any], pooling: str) -> FloatArray:
    """Return one vector [rows, size] of the hidden states [rows, length, size] of each row.

    `mean`: the mean over the tokens; `cls`: of the first token; `last`: of the last one. The mask
    [rows, length] is 1 for tokens. Source: the module Pooling of sentence-transformers.
    """
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1] != 0, axis=1)
        ends: FloatArray = hidden[np.arange(len(hidden)), last]
        return ends
    weights = mask.astype(np.float32)
    sums = (weights[:, None, :] @ hidden)[:, 0]
    means: FloatArray = sums / np.maximum(weights.sum(axis=1, keepdims=True), 1e-9)
    return means


def normalized(vectors: FloatArray) -> FloatArray:
    """Return vectors of length 1, along the last axis; zeros stay zeros."""
    lengths = np.sqrt(np.vecdot(vectors, vectors))[..., None]
    scaled: FloatArray = vectors / np.maximum(lengths, 1e-12)
    return scaled


def _shape(inference: Inference) -> tuple[int, int]:
    """Return the rows and the length of the texts of a request."""
    rows, length = next(iter(inference.inputs.values())).shape
    return rows, length


def _is_rectangular(inference: Inference) -> bool:
    """Whether the inputs of a request have one shape, [texts, tokens]; otherwise it fails."""
    shapes = {tensor.shape for tensor in inference.inputs.values()}
    shape = shapes.pop()
    if not shapes and len(shape) == 2 and shape[1]:
        return True
    inference.fail(
        InferenceError(
            f"the inputs of model '{inference.request.model_name}' have different shapes, or no tokens",
            remedy="send all of them with one shape, [texts, tokens]",
        )
    )
    return False


def _padded(inference: Inference, name: str, length: int) -> NDArray[Any]:
    array = inference.inputs[name].array
    missing = length - array.shape[1]
    # The mask is 0 there, so that the ids are not read; 0 is an id of any vocabulary.
    return np.pad(array, ((0, 0), (0, missing))) if missing else array
