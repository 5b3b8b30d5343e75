"""Encoder model: an ensemble of a tokenizer and an encoder, which makes vectors or scores of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from genserve.backends.backend import integer_parameter
from genserve.backends.tokenizer_backend import PAIR, TEXT, read_prompts
from genserve.config.model_config import ATTENTION_MASK, EnsembleStep, ModelConfig
from genserve.inference import InferenceRequest
from genserve.tensor import DataType, Tensor, string_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderModel:
    """The two steps of an ensemble, which the routes of embeddings and rerankers run one after the other.

    Attributes:
        name: the name of the ensemble.
        tokenizer, encoder: the steps.
        reads_pairs: whether the tokenizer takes two texts, of which the encoder computes a score.
        token_types: the data types of the tokenizer's outputs, by their names.
        output: the output of the encoder that is the ensemble's.
        size: how many numbers a vector has, or the scores of a pair; -1: the config does not say.
        max_length: the most tokens of a text; None: any number.
        batch_size: how many texts one request to a step may have.
        prompts: one is written before each text, by the use of its vector; the use "" is the default.
    """

    name: str
    tokenizer: EnsembleStep
    encoder: EnsembleStep
    reads_pairs: bool
    token_types: Mapping[str, DataType]
    output: str
    size: int
    max_length: int | None
    batch_size: int
    prompts: Mapping[str, str]

    @property
    def capability(self) -> str:
        """What the model computes: `embedding`, as Ollama calls it, or `rerank`."""
        return "rerank" if self.reads_pairs else "embedding"

    def tokenize(self, texts: list[tuple[str, ...]], *, truncate: bool) -> InferenceRequest:
        """Return the request to the tokenizer for texts, or pairs of texts."""
        names = (TEXT, PAIR) if len(texts[0]) > 1 else (TEXT,)
        inputs = {
            name: string_tensor(name, [text[index] for text in texts], shape=(len(texts), 1))
            for index, name in enumerate(names)
        }
        return InferenceRequest(
            model_name=self.tokenizer.model_name,
            model_version=self.tokenizer.model_version,
            inputs=inputs,
            parameters={"truncate": True} if truncate else {},
        )

    def tokens_of(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return what the tokenizer would return for a text with these token ids."""
        values = {ATTENTION_MASK: [1] * len(ids), "token_type_ids": [0] * len(ids)}
        return {
            name: Tensor(name, np.array([values.get(name, ids)], data_type.numpy))
            for name, data_type in self.token_types.items()
        }

    def encode(self, tokens: Mapping[str, Tensor]) -> InferenceRequest:
        """Return the request to the encoder for the outputs of the tokenizer."""
        made = self.tokenizer.output_map
        by_name = {made[name]: tensor for name, tensor in tokens.items() if name in made}
        return InferenceRequest(
            model_name=self.encoder.model_name,
            model_version=self.encoder.model_version,
            inputs={name: by_name[value].renamed(name) for name, value in self.encoder.input_map.items()},
            requested_outputs=(self.output,),
        )


def encoder_model(
    config: ModelConfig, config_of: Callable[[EnsembleStep], ModelConfig]
) -> EncoderModel | None:
    """Return the encoder model that an ensemble is; None: it is another kind of ensemble.

    Its steps are a tokenizer with an attention mask, and an encoder of which the ensemble has an output.

    Args:
        config: the config of the ensemble.
        config_of: returns the config of a step; raises InferenceError.
    """
    if len(config.ensemble_steps) != 2:
        return None
    tokenizer, encoder = config.ensemble_steps
    if config_of(tokenizer).backend != "tokenizer":
        tokenizer, encoder = encoder, tokenizer
    first, second = config_of(tokenizer), config_of(encoder)
    outputs = [name for name, made in encoder.output_map.items() if config.output(made) is not None]
    is_tokenizer = first.backend == "tokenizer" and first.output(ATTENTION_MASK) is not None
    if not (is_tokenizer and second.is_encoder and outputs):
        return None
    spec = second.output(outputs[0])
    return EncoderModel(
        name=config.name,
        tokenizer=tokenizer,
        encoder=encoder,
        reads_pairs=config.input(PAIR) is not None,
        token_types={one.name: DataType.from_config_name(one.data_type) for one in first.outputs},
        output=outputs[0],
        size=spec.dims[-1] if spec is not None and spec.dims else -1,
        max_length=integer_parameter(first.parameters, "max_length", default=0) or None,
        batch_size=max(1, min(first.max_batch_size, second.max_batch_size)),
        prompts=read_prompts(first),
    )
