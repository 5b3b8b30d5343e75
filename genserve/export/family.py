"""Family: one class of architectures, as a table from which checkpoints become graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint
from genserve.export.decoder import Activation, Decoder
from genserve.export.weights import DecoderWeights, Names

__all__ = ["Family", "Unsupported", "read_activation", "require"]

# By transformers' names.
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

# What reading a config may raise: a field is missing, of another type, or a zero.
_SENSELESS = (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

# A checkpoint may have a copy of the embedding that is its head.
_HEAD = "lm_head.weight"


class Unsupported(ExportError):
    """A sound model, but none that a graph of the families computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All that the export knows of a family; one file in `families/`, and a line in `architectures.py`."""

    name: str
    # Of the config as transformers completes it; refuses by name, with `require`, what it cannot tell.
    describe: Callable[[Any], Decoder]
    names: Names
    prefix: str                    # of all tensors but the head's; checkpoints without a head may lack it
    ignored: tuple[str, ...] = ()  # ends of the names of tensors that are recomputed from the config
    # Starts of names: as checkpoints have them, and as transformers has named its modules since.
    renamed: Mapping[str, str] = field(default_factory=dict)

    def decoder(self, config: Mapping[str, Any]) -> Decoder:
        """What the model with this config.json computes.

        Raises:
            Unsupported: the config asks for what the graph has not.
            ExportError: it makes no sense, or the weights are quantised.
        """
        if "quantization_config" in config:
            raise ExportError(
                "the config has quantised weights, which cannot be read",
                remedy="known: float32, float16 and bfloat16",
            )
        try:
            _require_one_model(config)
            decoder = self.describe(AutoConfig.for_model(**config))
            _require_sizes(decoder)
        except _SENSELESS as error:
            raise ExportError(
                f"config.json is not that of a {self.name} model: {' '.join(str(error).split())}",
                remedy="download the checkpoint again",
            ) from error
        return decoder

    def completed(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with its tensors named as the modules of transformers are."""
        prefixed = any(name.startswith(self.prefix) for name in checkpoint.tensor_names)
        own = {self._module_name(name, prefixed=prefixed): name for name in checkpoint.tensor_names}
        return replace(
            checkpoint, tensor_names=frozenset(own), load=lambda name: checkpoint.load(own[name])
        )

    def _module_name(self, name: str, *, prefixed: bool) -> str:
        for old, new in self.renamed.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name if prefixed or name.startswith(_HEAD) else f"{self.prefix}{name}"

    def may_ignore(self, name: str) -> bool:
        """Whether a tensor that no role has asked for does no harm."""
        return name.endswith((*self.ignored, _HEAD))

    def weights(self, checkpoint: Checkpoint, decoder: Decoder) -> DecoderWeights:
        """The tensors of the checkpoint by their roles."""
        return DecoderWeights.of(checkpoint, names=self.names, decoder=decoder)


def require(holds: bool, *, found: str, known: str) -> None:  # noqa: FBT001
    """Refuse what a config asks for and the graph has not.

    Raises:
        Unsupported: it does not hold; the message has what was found, the remedy what is known.
    """
    if not holds:
        raise Unsupported(f"the config has {found}, which the graph has not", remedy=f"known: {known}")


def read_activation(name: str) -> Activation:
    """The activation that a config names.

    Raises:
        Unsupported: the graph does not have it.
    """
    require(name in _ACTIVATIONS, found=f"the activation {name!r}", known=", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def _require_one_model(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    named = config.get("architectures") or [model]
    if model not in named:
        raise ValueError(f"model_type {kind!r} is {model}, not {named[0]}")


def _require_sizes(decoder: Decoder) -> None:
    if decoder.context_length < 2:
        raise ValueError(f"{decoder.context_length} tokens have no room for a prompt and an answer")
    grouped = decoder.num_heads % decoder.num_kv_heads == 0
    found = f"num_key_value_heads {decoder.num_kv_heads}"
    require(grouped, found=found, known="divisors of num_attention_heads")
