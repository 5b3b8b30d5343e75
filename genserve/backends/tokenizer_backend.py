"""Tokenizer backend: text in, token ids out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from genserve.backends.backend import ModelSource, Placement, integer_parameter
from genserve.config.model_config import ATTENTION_MASK, ModelConfig
from genserve.errors import GenserveError, InferenceError, RepositoryError
from genserve.inference import Inference, InferenceResponse
from genserve.tensor import DataType, Tensor, decode_strings
from genserve.text.tokenizer import EncodedText, Tokenizer
from genserve.text.tokenizer_files import recommended_sampling_params

TEXT, PAIR = "text_input", "text_pair"


class TokenizerBackend:
    """A `Backend` that encodes texts: `text_input` [batch, 1] to `input_ids` [batch, num_tokens].

    For an encoder it has the output `attention_mask`, and then texts of different lengths are padded. The
    output `token_type_ids` tells the two texts of a pair apart, whose second is `text_pair` [batch, 1]. With
    the parameter `max_length` longer texts are rejected, or truncated if the request says `truncate`.
    """

    @classmethod
    def auto_complete(cls, message: Any, *, path: Any, version: int, default_max_batch_size: int) -> None:
        """Do nothing: the file does not describe the tensors."""

    @classmethod
    def load(cls, source: ModelSource) -> Tokenizer:
        """Read the tokenizer's files; all instances share it."""
        return Tokenizer.from_folder(source.folder)

    @classmethod
    def check_files(cls, folder: Path, config: ModelConfig) -> None:
        """See `Backend`; reads what a load reads, and what a text model reads with it."""
        read_prompts(config)
        Tokenizer.from_folder(folder)
        recommended_sampling_params(folder)

    def __init__(self, source: ModelSource, shared: Tokenizer, placement: Placement) -> None:
        self._tokenizer = shared
        self._outputs = source.config.outputs
        self._pads = source.config.output(ATTENTION_MASK) is not None
        read_prompts(source.config)  # which are checked here, and written by routes
        self._max_length = integer_parameter(source.config.parameters, "max_length", default=0) or None

    def execute(self, batch: Sequence[Inference]) -> None:
        """Encode the texts of each inference; one whose texts are invalid or too long fails alone."""
        for inference in batch:
            try:
                rows = self._encode_for_encoder(inference) if self._pads else self._encode(inference)
            except GenserveError as error:
                inference.fail(error)
            else:
                inference.send(InferenceResponse(outputs=tuple(self._tensors(rows))), final=True)

    def close(self) -> None:
        """End the process that renders the chat template; other users of the tokenizer start another."""
        self._tokenizer.close()

    def _encode(self, inference: Inference) -> list[EncodedText]:
        """Raises InferenceError: the texts of one request have different numbers of tokens."""
        rows = [self._tokenizer.encode(text) for text in decode_strings(inference.inputs[TEXT])]
        if len({len(row) for row in rows}) > 1:
            raise InferenceError(
                f"the texts of one request to '{inference.request.model_name}' have different numbers of "
                "tokens",
                remedy="send each text in a separate request",
            )
        return [EncodedText(row, [0] * len(row)) for row in rows]

    def _encode_for_encoder(self, inference: Inference) -> list[EncodedText]:
        inputs = inference.inputs
        columns = [decode_strings(inputs[name]) for name in (TEXT, PAIR) if name in inputs]
        return self._tokenizer.encode_texts(
            [*zip(*columns, strict=True)],
            max_length=self._max_length,
            truncate=inference.request.parameters.get("truncate") is True,
        )

    def _tensors(self, rows: Sequence[EncodedText]) -> list[Tensor]:
        length = max((len(row.ids) for row in rows), default=0)
        tensors = []
        for spec in self._outputs:
            array = np.zeros((len(rows), length), DataType.from_config_name(spec.data_type).numpy)
            for values, row in zip(array, rows, strict=True):
                values[: len(row.ids)] = {ATTENTION_MASK: 1, "token_type_ids": row.type_ids}.get(
                    spec.name, row.ids
                )
            tensors.append(Tensor(spec.name, array))
        return tensors


def read_prompts(config: ModelConfig) -> Mapping[str, str]:
    """Return what is written before texts, by the use of their vectors; the use "" is the default.

    Raises:
        RepositoryError: the parameter `prompts` is no JSON object of texts, or lacks `default_prompt_name`.
    """
    parameters = config.parameters
    return _prompts(parameters.get("prompts", "{}"), parameters.get("default_prompt_name"))


@lru_cache(maxsize=64)  # a route reads them for each request
def _prompts(text: str, default: str | None) -> Mapping[str, str]:
    try:
        prompts = json.loads(text)
    except ValueError:
        prompts = None
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise RepositoryError(
            "the parameter prompts is no JSON object of texts", remedy='write {"query": "query: "}'
        )
    if default is not None and default not in prompts:
        raise RepositoryError(
            f"the parameter default_prompt_name is '{default}', which prompts lacks",
            remedy=f"write one of {', '.join(prompts)}",
        )
    return {**prompts, "": prompts[default] if default is not None else ""}
