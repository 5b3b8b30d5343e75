"""Family: describes a class of architectures, by which checkpoints are turned into graphs.

A family has names of fields and tensors, and arithmetic on the values of a config. It adds no operator to a
graph: what a layer does is a value (`decoder.py`), and `graphs/decoder_graph.py` writes the graphs of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from genserve.errors import ExportError
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.checkpoints.expert_tensors import TransposedStacks
from genserve.export.decoder import Activation, Decoder, Rotary
from genserve.export.decoder_weights import DecoderWeights, TensorMap

# The activations by their names in transformers.
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": "silu",
        "relu": "relu",
        "relu2": "relu2",
        "xielu": "xielu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    }
)

_UNGATED = ("relu2", "xielu")
# Tensors that all families ignore, because they are recomputed from the config: suffixes of names.
_RECOMPUTED = ("rotary_emb.inv_freq",)

# Raised for a config that lacks a field, or has a field of a wrong type or a zero.
_INVALID_CONFIG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

# Layers that predict further tokens, of Qwen 3.5 and others.
_PREDICTORS = ("mtp.",)
# A checkpoint with a tied head may still have a copy of it.
_HEAD = "lm_head.weight"
# The types in transformers whose angles depend only on the position, at least up to `rotary_limit`.
_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


class Unsupported(ExportError):
    """The model is valid, but the graphs of the families cannot compute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family, which maps a config and the names in a checkpoint to a decoder and its weights."""

    name: str
    # Reads the config that transformers has completed; rejects unsupported options with `require`.
    describe: Callable[[Any], Decoder]
    names: TensorMap
    prefix: str                    # begins all names but the head's; absent in checkpoints without a head
    ignored: tuple[str, ...] = ()  # suffixes of tensors that are recomputed from the config
    # Parts of names in checkpoints, and what they are in the present names of transformers' modules.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # Whether transformers' modules have the experts as [experts, inputs, outputs], and how these outputs are
    # gates and values.
    transposed_stacks: TransposedStacks | None = None

    def decoder(self, config: Mapping[str, Any]) -> Decoder:
        """Return the decoder of a config.json.

        Raises:
            Unsupported: the config has an option that the graph does not support.
            ExportError: the config is invalid.
        """
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
        """Return the checkpoint with its tensors renamed to the names of transformers' modules.

        Layers that predict further tokens, which follow the others, are left out.
        """
        prefixed = any(self._renamed(name).startswith(self.prefix) for name in checkpoint.tensor_names)
        config = checkpoint.config
        predictors = tuple(
            f"{self.prefix}layers.{config['num_hidden_layers'] + index}."
            for index in range(config.get("num_nextn_predict_layers") or 0)
        )
        own = {self._module_name(name, prefixed=prefixed): name for name in checkpoint.tensor_names}
        predictors += _PREDICTORS
        kept = {name: own_name for name, own_name in own.items() if not name.startswith(predictors)}
        return checkpoint.renamed(kept)

    def _module_name(self, name: str, *, prefixed: bool) -> str:
        name = self._renamed(name)
        return name if prefixed or name.startswith(_HEAD) else f"{self.prefix}{name}"

    def _renamed(self, name: str) -> str:
        for old, new in self.renamed.items():
            name = name.replace(old, new)
        return name

    def may_ignore(self, name: str) -> bool:
        """Whether a tensor that no role uses is redundant."""
        return name.endswith((*self.ignored, *_RECOMPUTED, _HEAD))

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


def read_activation(name: str, *, gated: bool = False) -> Activation:
    """Return the activation that a config names, for an MLP with or without a gate.

    Raises:
        Unsupported: the graph does not support it.
    """
    known = [each for each in _ACTIVATIONS if not (gated and each in _UNGATED)]
    require(name in known, found=f"the activation {name!r}", known=", ".join(known))
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
    require(bool(decoder.attentions), found="no layer with attention", known="models with such a layer")
    for attention in decoder.attentions:
        num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
        found = f"num_key_value_heads {num_kv_heads}"
        require(num_heads % num_kv_heads == 0, found=found, known="divisors of num_attention_heads")


def read_rotary(config: Any, *, num_dims: int, layer_type: str | None = None) -> Rotary:
    """Return the rotary positions of a config of transformers with `rope_parameters`.

    Args:
        config: a config of transformers.
        num_dims: the rotary dimensions of a head.
        layer_type: selects the parameters if they differ between types of layers.

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
    """Return the longest text with these angles.

    longrope uses other angles throughout a longer text. Users add YaRN to a config, as the cards of Qwen say,
    and leave the length without it in `max_position_embeddings`; vLLM reads such a config in the same way.
    """
    parameters, limit = config.rope_parameters, config.max_position_embeddings
    match parameters:
        case {"rope_type": "longrope", "original_max_position_embeddings": original}:
            limit = original
        case {"rope_type": "yarn", "original_max_position_embeddings": int(original), "factor": factor}:
            limit = max(limit, int(original * factor))
    tokens: int = limit
    return tokens


def _frequencies(parameters: Mapping[str, Any], *, num_dims: int) -> tuple[float, ...]:
    """Return the inverse frequencies, in float32 as in transformers. Source: Su et al., "RoFormer" (2021)."""
    exponents = np.arange(0, num_dims, 2, dtype=np.float32) / np.float32(num_dims)
    # numpy's powers in float32 are less exact than torch's.
    powers = (parameters["rope_theta"] ** exponents.astype(np.float64)).astype(np.float32)
    return tuple((1 / powers).tolist())
