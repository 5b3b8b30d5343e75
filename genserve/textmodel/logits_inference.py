"""Logits inference: a logits stage asked by named tensors, as a BLS loop does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from genserve.config.model_config import ModelConfig
from genserve.engine.engine_request import LogitsRequest
from genserve.engine.engine_thread import EngineThread
from genserve.errors import Closed, GenserveError, InvalidRequest
from genserve.inference import Inference, InferenceResponse
from genserve.inference_statistics import ModelStatistics
from genserve.sampling.logits_array import LogitsArray
from genserve.tensor import DataType, Tensor
from genserve.textmodel.logits_config import LogitsNames
from genserve.textmodel.logits_runtime import LogitsFigures


class LogitsInference:
    """Answers token ids [batch, n] with the logits after the last [batch, 1, vocab_size]; a `ModelRuntime`.

    A request that begins with the ids of an earlier one computes only the new ones, and shares its step
    with the engine's other requests. So a loop that sends all ids again for each token costs no more than
    one that keeps a cache.
    """

    def __init__(
        self,
        engine: EngineThread,
        config: ModelConfig,
        *,
        logits: LogitsFigures,
        statistics: ModelStatistics,
        owns_engine: bool,
    ) -> None:
        """Answer by an engine.

        Args:
            engine: runs the stage.
            config: the stage's config.
            logits: the model that the engine runs.
            statistics: counts the executions.
            owns_engine: whether `close` closes the engine; otherwise a text model closes it.

        Raises:
            RepositoryError: the config is not a logits stage's.
        """
        self._engine = engine
        self._names = LogitsNames.of(config)
        self._statistics = statistics
        self._owns_engine = owns_engine
        self._logits = logits

    @property
    def ready(self) -> bool:
        """Whether the engine runs."""
        return self._engine.ready

    @property
    def num_waiting(self) -> int:
        """Inferences that wait to be scheduled."""
        return max(0, self._engine.num_accepted - self._engine.num_running)

    def submit(self, inference: Inference) -> None:
        """Submit each row to the engine.

        Raises:
            InvalidRequest: there are no rows, or one is empty or has ids outside the vocabulary.
            ContextLengthExceeded: a row is longer than a sequence can be.
            Overloaded: the queue is full.
        """
        rows = _Rows(inference, output=self._names.logits)
        requests = [
            LogitsRequest(
                token_ids,
                on_logits=partial(rows.take, row),
                vocab_size=self._logits.vocab_size,
                max_length=self._logits.max_length,
                share=inference.share,
            )
            for row, token_ids in enumerate(_unpadded(inference, self._names))
        ]
        inference.started_ns = inference.submitted_ns
        inference.when_ended(self._statistics.executed_alone)
        self._engine.submit_logits(requests)

        def cancel() -> None:
            for request in requests:
                self._engine.cancel(request)
            inference.fail_cancelled()

        inference.when_cancelled(cancel)

    def execute(self, batch: Sequence[Inference]) -> None:
        """Submit a batch. Raises what `submit` raises."""
        for inference in batch:
            self.submit(inference)

    def close(self) -> None:
        """Close the engine, if it is this stage's own."""
        if self._owns_engine:
            self._engine.close()


class _Rows:
    """Collects the logits of the rows of one inference. Belongs to the engine's thread."""

    def __init__(self, inference: Inference, *, output: str) -> None:
        self._inference = inference
        self._output = output
        self._logits: list[LogitsArray | None] = [None] * inference.batch_size
        self._num_missing = inference.batch_size

    def take(self, row: int, content: LogitsArray | GenserveError) -> None:
        """Record the logits of a row, or its error."""
        if isinstance(content, GenserveError):
            self._inference.fail(content)
            return
        self._logits[row] = content
        self._num_missing -= 1
        if self._num_missing:
            return
        rows = [logits for logits in self._logits if logits is not None]
        outputs = (Tensor(self._output, _stacked(rows)[:, None, :], data_type=DataType.FP32),)
        with suppress(Closed):  # the inference may have been cancelled while the step ran
            self._inference.send(InferenceResponse(outputs=outputs), final=True)


def _stacked(rows: Sequence[LogitsArray]) -> LogitsArray:
    """Return the rows as one array [R, V], on their device."""
    if len(rows) == 1:
        return rows[0][None]
    if isinstance(rows[0], np.ndarray):
        return np.stack(rows)
    import torch  # loaded, since the rows are its tensors

    return torch.stack(list(rows))


def _unpadded(inference: Inference, names: LogitsNames) -> list[NDArray[np.int64]]:
    """Return the ids of each row, without the ids that the attention mask excludes."""
    ids = inference.inputs[names.input_ids].array
    if not len(ids):
        raise InvalidRequest(
            f"{names.input_ids} has no rows", field=names.input_ids, remedy="send a row for each sequence"
        )
    mask = inference.inputs.get(names.attention_mask or "")
    if mask is None:
        return list(ids)
    if mask.shape != ids.shape:
        raise InvalidRequest(
            f"{mask.name} has the shape {list(mask.shape)}, {names.input_ids} {list(ids.shape)}",
            field=mask.name,
            remedy="send 1 for each id and 0 for padding, or leave the mask out",
        )
    return [row[keep != 0] for row, keep in zip(ids, mask.array, strict=True)]
