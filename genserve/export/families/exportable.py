"""Exportable: rejects a checkpoint whose config shows that it cannot be exported, before reading weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from genserve.errors import ExportError
from genserve.export.checkpoints.quantized_checkpoint import quantization_of, require_readable
from genserve.export.families import FAMILIES, architecture
from genserve.export.families.family import Unsupported
from genserve.export.families.text_part import text_config

EXPERTS = "a mixture of experts, which is not supported"
RECURRENT = "layers with recurrent state instead of attention, which are not supported"
LATENT = "attention over compressed keys and values, which is not supported"
_SHARED = "layers that share keys and values or have embeddings of their own, which are not supported"
_SENSES = "an encoder of images or sound, which is not supported"
_ENCODER = "an encoder that reads the prompt, which is not supported"
_OWN_CODE = "code of its own, which is not run"
_NO_GENERATION = "no part that generates text"

_ATTENTION = frozenset({"attention", "chunked_attention", "full_attention", "sliding_attention"})
_EXPERT_COUNTS = (
    "moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts", "num_routed_experts",
)  # fmt: skip
# The architectures whose linear layers have weights [inputs, outputs].
_CONV1D = frozenset({"GPT2LMHeadModel", "OpenAIGPTLMHeadModel"})
# Checkpoints for similar uses that can be exported, by the beginning of a model type.
_NEAREST = {
    "deepseek": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "gemma": "google/gemma-3-1b-it",
    "granite": "ibm-granite/granite-3.3-2b-instruct",
    "llama": "meta-llama/Llama-3.2-1B-Instruct",
    "llava": "meta-llama/Llama-3.2-1B-Instruct",
    "mi": "mistralai/Mistral-7B-Instruct-v0.3",
    "mllama": "meta-llama/Llama-3.2-1B-Instruct",
    "olmo": "allenai/OLMo-2-0425-1B-Instruct",
    "phi": "microsoft/Phi-3.5-mini-instruct",
    "qwen": "Qwen/Qwen3-1.7B",
}
_NEAREST_OF_ALL = "HuggingFaceTB/SmolLM2-1.7B-Instruct"


def require_exportable(config: Mapping[str, Any], *, source: str) -> None:
    """Reject a checkpoint that neither a family nor tracing can convert.

    Args:
        config: config.json of the checkpoint.
        source: the checkpoint's name in messages.

    Raises:
        ExportError: the checkpoint cannot be exported; the message names the architecture, what is not
            supported, and a similar checkpoint that is.
    """
    name, text = architecture(config), text_config(config)
    model_type = str(config.get("model_type"))
    if architecture(text) not in FAMILIES:
        for reason in _reasons(config, name=name):
            raise refusal(source, architecture=name, reason=reason, model_type=model_type)
    elif (unsupported := _unsupported(text)) is not None and any(_reasons(config, name=name)):
        # The family knows better what is missing; what it lacks of a plain decoder is traced.
        raise ExportError(
            f"{source} has the architecture {name}, but {unsupported.message}",
            remedy=f"{unsupported.remedy}; the nearest that works: {_nearest(model_type)}",
        )
    if (quantization := quantization_of(config)) is not None:
        require_readable(quantization, source=source)
        if name in _CONV1D:
            reason = "quantized weights, which do not tell whether they are [inputs, outputs] or transposed"
            raise refusal(source, architecture=name, reason=reason, model_type=model_type)


def refusal(source: str, *, architecture: str, reason: str, model_type: str) -> ExportError:
    """Return the error for a checkpoint whose architecture cannot be exported, for this reason."""
    return ExportError(
        f"{source} has the architecture {architecture} with {reason}",
        remedy=f"the nearest that works: {_nearest(model_type)}",
    )


def _nearest(model_type: str) -> str:
    kin = (nearest for beginning, nearest in _NEAREST.items() if model_type.startswith(beginning))
    return next(kin, _NEAREST_OF_ALL)


def _unsupported(config: Mapping[str, Any]) -> Unsupported | None:
    """Return why the family of a config does not build it; None: it does."""
    try:
        FAMILIES[architecture(config)].decoder(config)
    except Unsupported as error:
        return error
    except ExportError:     # the config is invalid, as the conversion will say
        pass
    return None


def _reasons(config: Mapping[str, Any], *, name: str) -> Iterator[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if any(key.endswith(("vision_config", "audio_config")) for key in config):
        yield _SENSES
    if config.get("is_encoder_decoder"):
        yield _ENCODER
    nested = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    if any(_is_above(part.get(key), 1) for part in nested for key in _EXPERT_COUNTS):
        yield EXPERTS
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        yield _OWN_CODE if "auto_map" in config else _NO_GENERATION
    if _has_state(config):
        yield RECURRENT
    if _is_above(config.get("kv_lora_rank"), 0):
        yield LATENT
    if any(_is_above(config.get(key), 0) for key in ("num_kv_shared_layers", "vocab_size_per_layer_input")):
        yield _SHARED


def _has_state(config: Mapping[str, Any]) -> bool:
    """Whether a layer has a state other than keys and values, by the config that transformers completes."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        completed = AutoConfig.for_model(**config)
    except Exception:   # transformers raises any class; the conversion will say what is wrong with the config
        return False
    kinds = getattr(completed, "layer_types", None) or ()
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(completed), None)
    return not _ATTENTION.issuperset(kinds) or bool(getattr(model, "_is_stateful", False))


def _is_above(value: Any, limit: int) -> bool:
    return isinstance(value, int) and value > limit
