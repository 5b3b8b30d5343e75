"""Tokenizer backend: text in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from genserve.backends.backend import ModelSource, Placement
from genserve.errors import InferenceError
from genserve.inference import Inference, InferenceResponse
from genserve.tensor import Tensor, decode_strings
from genserve.text.tokenizer import Tokenizer


class TokenizerBackend:
    """A `Backend` that encodes texts: `text_input` [batch, 1] to `input_ids` [batch, num_tokens]."""

    @classmethod
    def auto_complete(cls, message: Any, *, path: Any, version: int, default_max_batch_size: int) -> None:
        """Do nothing: the file does not describe the tensors."""

    @classmethod
    def load(cls, source: ModelSource) -> Tokenizer:
        """Read the tokenizer's files; all instances share it."""
        return Tokenizer.from_folder(source.folder)

    def __init__(self, source: ModelSource, shared: Tokenizer, placement: Placement) -> None:
        self._tokenizer = shared

    def execute(self, batch: Sequence[Inference]) -> None:
        """Encode the texts of each inference.

        Raises:
            InferenceError: the texts of one request have different numbers of tokens.
        """
        for inference in batch:
            rows = [self._tokenizer.encode(text) for text in decode_strings(inference.inputs["text_input"])]
            if len({len(row) for row in rows}) > 1:
                raise InferenceError(
                    f"the texts of one request to '{inference.model_name}' have different numbers of tokens",
                    remedy="send each text in a separate request",
                )
            output = Tensor("input_ids", np.array(rows, dtype=np.int64))
            inference.send(InferenceResponse(outputs=(output,)), final=True)

    def close(self) -> None:
        """End the process that renders the chat template; other users of the tokenizer start another."""
        self._tokenizer.close()
