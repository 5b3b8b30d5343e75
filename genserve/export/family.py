"""Family: one class of architectures, as a table from which checkpoints become graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint
from genserve.export.decoder import Activation, Decoder, Rotary
from genserve.export.decoder_weights import DecoderWeights, TensorMap

# By the names in transformers.
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": "silu",
        "relu": "relu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    }
)

# Raised by a config that lacks a field, or has one of another type, or a zero.
_INVALID_CONFIG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

# A checkpoint with a tied head may still have a copy of it.
_HEAD = "lm_head.weight"
# The types in transformers whose angles depend only on the position, at least up to `rotary_limit`.
_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


class Unsupported(ExportError):
    """The model is valid, but the graphs of the families cannot compute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: a table in `families.py`."""

    name: str
    # Takes the config as transformers completes it; rejects unsupported options with `require`.
    describe: Callable[[Any], Decoder]
    names: TensorMap
    prefix: str                    # of all tensors but the head's; checkpoints without a head may omit it
    ignored: tuple[str, ...] = ()  # suffixes of tensors that are recomputed from the config
    # Prefixes of tensors in checkpoints, and the names that transformers now gives those modules.
    renamed: Mapping[str, str] = field(default_factory=dict)

    def decoder(self, config: Mapping[str, Any]) -> Decoder:
        """Return the decoder of a config.json.

        Raises:
            Unsupported: the config has an option that the graph does not support.
            ExportError: the config is invalid, or the weights are quantized.
        """
        if "quantization_config" in config:
            raise ExportError(
                "the config has quantized weights, which are not supported",
                remedy="known: float32, float16 and bfloat16",
            )
        try:
            return self.described(_completed(config))
        except _INVALID_CONFIG as error:
            raise ExportError(
                f"config.json does not describe a {self.name} model: {' '.join(str(error).split())}",
                remedy="download the checkpoint again",
            ) from error

    def described(self, config: Any) -> Decoder:
        """Return the decoder of a config that transformers has completed.

        Raises:
            Unsupported: the config has an option that the graph does not support.
        """
        decoder = self.describe(config)
        _require_sizes(decoder)
        return decoder

    def completed(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with its tensors renamed to the names of transformers' modules."""
        prefixed = any(name.startswith(self.prefix) for name in checkpoint.tensor_names)
        own = {self._module_name(name, prefixed=prefixed): name for name in checkpoint.tensor_names}
        return replace(checkpoint, tensor_names=frozenset(own), load=lambda name: checkpoint.load(own[name]))

    def _module_name(self, name: str, *, prefixed: bool) -> str:
        for old, new in self.renamed.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name if prefixed or name.startswith(_HEAD) else f"{self.prefix}{name}"

    def may_ignore(self, name: str) -> bool:
        """Whether the tensor, which no role uses, is redundant."""
        return name.endswith((*self.ignored, _HEAD))

    def weights(self, checkpoint: Checkpoint, decoder: Decoder) -> DecoderWeights:
        """Return the tensors of the checkpoint by their roles."""
        return DecoderWeights.of(checkpoint, names=self.names, decoder=decoder)


def require(holds: bool, *, found: str, known: str) -> None:  # noqa: FBT001
    """Reject an option of a config that the graph does not support.

    `found` names the option in the message, `known` the supported values in the remedy.

    Raises:
        Unsupported: `holds` is false.
    """
    if not holds:
        raise Unsupported(
            f"the config has {found}, which the graph does not support", remedy=f"known: {known}"
        )


def read_activation(name: str) -> Activation:
    """Return the activation that a config names.

    Raises:
        Unsupported: the graph does not support it.
    """
    require(name in _ACTIVATIONS, found=f"the activation {name!r}", known=", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def _completed(config: Mapping[str, Any]) -> Any:
    """Return the config of transformers, with the defaults of its model type."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    named = config.get("architectures") or [model]
    if model not in named:
        raise ValueError(f"model_type {kind!r} means {model}, not {named[0]}")
    try:
        return AutoConfig.for_model(**config)
    except StrictDataclassError as error:
        raise ValueError(error) from error


def _require_sizes(decoder: Decoder) -> None:
    if decoder.context_length < 2:
        raise ValueError(f"a context of {decoder.context_length} tokens cannot hold a prompt and an answer")
    grouped = decoder.num_heads % decoder.num_kv_heads == 0
    found = f"num_key_value_heads {decoder.num_kv_heads}"
    require(grouped, found=found, known="divisors of num_attention_heads")


def read_rotary(config: Any, *, num_dims: int, layer_type: str | None = None) -> Rotary:
    """Return the rotary positions of a config of transformers with `rope_parameters`.

    Args:
        config: of transformers.
        num_dims: the rotary dimensions of a head.
        layer_type: selects the parameters, if they differ between types of layers.

    Raises:
        ExportError: the type of `rope_scaling` is not supported.
    """
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = parameters["rope_type"]
    require(kind in _TYPES, found=f"rope_scaling of type {kind!r}", known=", ".join(_TYPES))
    if kind == "default":
        return Rotary(frequencies=_frequencies(parameters, num_dims=num_dims))
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
    return Rotary(frequencies=tuple(frequencies.tolist()), scale=scale)


def rotary_limit(config: Any) -> int:
    """Return how many tokens have these angles; longrope applies others to all tokens of a longer text."""
    parameters, limit = config.rope_parameters, config.max_position_embeddings
    if parameters.get("rope_type") == "longrope":
        limit = parameters["original_max_position_embeddings"]
    tokens: int = limit
    return tokens


def _frequencies(parameters: Mapping[str, Any], *, num_dims: int) -> tuple[float, ...]:
    """Return the inverse frequencies. Source: Su et al., "RoFormer" (2021); in float32 as in transformers."""
    exponents = np.arange(0, num_dims, 2, dtype=np.float32) / np.float32(num_dims)
    # numpy's powers in float32 are less exact than torch's.
    powers = (parameters["rope_theta"] ** exponents.astype(np.float64)).astype(np.float32)
    return tuple((1 / powers).tolist())
