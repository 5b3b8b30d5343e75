"""Text models inside checkpoints for images or sound answer as the whole model does to text."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from genserve.export.families.text_part import WRAPPERS
from tests.export.graphs import write_graph
from tests.export.test_families import MAX_DIFFERENCE, chunked_logits, random_ids
from tests.export.tiny_models import TINY_MODELS, randomize, tiny_checkpoint
from tests.support.representatives import with_extended
from tests.support.tiny_llama import tiny_tokenizer
from tests.support.transformers_reference import reference_logits, reference_model

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_SOUND = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_mel_bins": 8,
}
_PATCHES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 1,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "patch_size": 14,
}
# The text model of each wrapper, by the wrapper's model type; beside them, an encoder of images or sound.
_TEXTS = {
    "gemma3": ("gemma3", "vision_config", _VISION | {"model_type": "siglip_vision_model"}),
    "gemma4": ("gemma4", "vision_config", _VISION | {"model_type": "gemma4_vision", "head_dim": 16}),
    "gemma4_unified": ("gemma4_unified", "vision_config", {"model_type": "gemma4_unified_vision"}),
    "idefics3": ("llama", "vision_config", _VISION | {"model_type": "idefics3_vision"}),
    "internvl": ("qwen2", "vision_config", _VISION | {"model_type": "internvl_vision"}),
    "llama4": ("llama4", "vision_config", _VISION | {"model_type": "llama4_vision_model"}),
    "llava": ("llama", "vision_config", _VISION | {"model_type": "clip_vision_model"}),
    "llava_next": ("mistral", "vision_config", _VISION | {"model_type": "clip_vision_model"}),
    "mistral3": ("ministral3", "vision_config", _VISION | {"model_type": "pixtral", "head_dim": 16}),
    "qwen3_5": ("qwen3_5", "vision_config", _PATCHES),
    "qwen3_5_moe": ("qwen3_5_moe", "vision_config", _PATCHES),
    "smolvlm": ("llama", "vision_config", _VISION | {"model_type": "smolvlm_vision"}),
    "voxtral": ("llama", "audio_config", _SOUND | {"model_type": "voxtral_encoder"}),
}


def wrapper(folder: Path, model_type: str) -> PreTrainedModel:
    """Write a random model of a wrapper, and return it."""
    text, encoder, encoder_config = _TEXTS[model_type]
    ids = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = AutoConfig.for_model(
        model_type, text_config={**ids, **TINY_MODELS[text]}, **{encoder: encoder_config}
    )
    [named] = {name for names in _MAPPINGS for kind, name in names.items() if kind == model_type}
    torch.manual_seed(0)  # of the parameters that `randomize` only adds to
    model = getattr(__import__("transformers"), named)._from_config(config, dtype=torch.float32).eval()
    randomize(model)
    model.save_pretrained(folder)
    tiny_tokenizer(vocab_size=320).save(str(folder / "tokenizer.json"))
    return model


_MAPPINGS = [
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
]


def test_every_wrapper_has_a_tiny_model() -> None:
    named = {name for names in _MAPPINGS for kind, name in names.items() if kind in _TEXTS}
    assert named | {"Gemma3nForConditionalGeneration"} == WRAPPERS


def test_the_text_model_of_gemma_3n_is_found_in_its_wrapper(tmp_path: Path) -> None:
    """Its encoder of images is one of timm, so the wrapper is written by hand."""
    folder, ids = tiny_checkpoint(tmp_path / "checkpoint", **TINY_MODELS["gemma3n"]), random_ids(100, seed=1)
    expected = reference_logits(reference_model(folder), ids)
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config | {"text_config": text}))
    path = folder / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(path).items()
    }
    save_file(tensors | {"model.embed_vision.embedding.weight": torch.ones(2, 2)}, path)
    graph = write_graph(folder, tmp_path / "graph")
    assert np.abs(chunked_logits(graph, ids) - expected).max() < MAX_DIFFERENCE


@pytest.mark.parametrize("model_type", with_extended(_TEXTS, always={"gemma3", "qwen3_5"}))
def test_a_text_model_equals_the_whole_model(
    tmp_path: Path, model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = wrapper(tmp_path / "checkpoint", model_type), random_ids(100, seed=1)
    with caplog.at_level(logging.WARNING):
        graph = write_graph(tmp_path / "checkpoint", tmp_path / "graph")
    assert "left out" in caplog.text
    assert np.abs(chunked_logits(graph, ids) - reference_logits(model, ids)).max() < MAX_DIFFERENCE


@pytest.mark.parametrize("model_type", ["gemma3", "llava"])
def test_the_names_of_older_files_are_known(tmp_path: Path, model_type: str) -> None:
    folder = tmp_path / "checkpoint"
    model, ids = wrapper(folder, model_type), random_ids(100, seed=1)
    path = folder / "model.safetensors"
    names: dict[str, Any] = {}
    for name, tensor in load_file(path).items():
        stem = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
        is_text = "language_model" in name and not name.startswith("language_model.lm_head")
        names[f"language_model.model.{stem}" if is_text else name] = tensor
    save_file(names, path)
    graph = write_graph(folder, tmp_path / "graph")
    assert np.abs(chunked_logits(graph, ids) - reference_logits(model, ids)).max() < MAX_DIFFERENCE
