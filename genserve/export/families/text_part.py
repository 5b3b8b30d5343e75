"""Text part: the text model inside a checkpoint that also has an encoder of images or sound.

transformers wraps such a text model: its config is `text_config`, its tensors have a longer prefix, and those
of the encoder are beside them. Text without images or sound passes only the text model, so it is exported as
a checkpoint of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.families import FAMILIES

logger = logging.getLogger(__name__)

# The wrappers whose text model computes what it would compute alone. PaliGemma is none of them: there, the
# tokens of a prompt attend to later ones. Nor are Aya Vision and Command A Vision, which do not scale logits.
WRAPPERS = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "VoxtralForConditionalGeneration",
    }
)
# The beginnings of tensors of a text model in a wrapper, by the time of their files, and alone.
TEXT_PREFIXES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model in a wrapper, if a family builds it, or else the same config."""
    named = config.get("architectures") or [None]
    if named[0] not in WRAPPERS:
        return config
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        whole = AutoConfig.for_model(**config)
        text: dict[str, Any] = whole.text_config.to_dict()
    except Exception:   # transformers raises any class; the refusal will name the wrapper
        return config
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text["model_type"])
    if architecture not in FAMILIES:
        return config
    tied = getattr(whole, "tie_word_embeddings", text.get("tie_word_embeddings"))
    return {**text, "architectures": [architecture], "tie_word_embeddings": tied}


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """Return the text model of a wrapper's checkpoint; any other checkpoint is returned as it is."""
    config = text_config(checkpoint.config)
    if config is checkpoint.config:
        return checkpoint
    own = {
        alone + name.removeprefix(prefix): name
        for name in checkpoint.tensor_names
        for prefix, alone in TEXT_PREFIXES.items()
        if name.startswith(prefix)
    }
    logger.warning(
        "%s: only its text model is exported; %d tensors for images or sound are left out",
        checkpoint.source,
        len(checkpoint.tensor_names) - len(own),
    )
    tied = config["tie_word_embeddings"] or "lm_head.weight" not in own
    return checkpoint.renamed(own, config={**config, "tie_word_embeddings": tied})
