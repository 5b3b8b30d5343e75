"""Tiny random Llama checkpoints with a tokenizer, written as Hugging Face folders."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = [
    "CHAT_TEMPLATE",
    "IN_WHOLE_BLOCKS",
    "SPECIAL_TOKENS",
    "add_shuffled_tokenizer",
    "llama_tensors",
    "tiny_llama_checkpoint",
    "tiny_tokenizer",
]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; the last ends a turn

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The sizes of a checkpoint whose layers have whole blocks of 256 weights, as formats of 4 bits want them.
IN_WHOLE_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def tiny_llama_checkpoint(
    folder: Path, *, seed: int = 0, vocab_size: int = 320, context: int = 256, **config: Any
) -> Path:
    """Write config.json, model.safetensors and the tokenizer files into `folder`; returns the folder.

    Two layers, 4 heads over 2 KV heads of 16, float32, tied embeddings; `config` overrides any key of
    config.json. Weights are random and depend on `seed` alone; every id below `vocab_size` is a token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    full = _llama_config(vocab_size=vocab_size, context=context) | config
    _write_json(folder / "config.json", full)
    save_file(llama_tensors(full, seed=seed), folder / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer(vocab_size=vocab_size).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "bos_token": SPECIAL_TOKENS[1],
            "eos_token": SPECIAL_TOKENS[2],
            "pad_token": SPECIAL_TOKENS[2],
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": context,
        },
    )
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    return folder


def tiny_tokenizer(*, vocab_size: int) -> Tokenizer:
    """A byte-level BPE: 3 special tokens, the 256 bytes, then pairs of letters as merges."""
    merges = list(product("etaoinshrdlucmfwygpbvkxqjz", repeat=2))[: vocab_size - 256 - len(SPECIAL_TOKENS)]
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def llama_tensors(config: dict[str, Any], *, seed: int) -> dict[str, NDArray[np.float32]]:
    """Random float32 tensors of a Llama checkpoint, by their Hugging Face names."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        linears = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in linears.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if config["attention_bias" if "attn" in name else "mlp_bias"]:
                shapes[f"{layer}.{name}.bias"] = shape[:1]
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    rng = np.random.default_rng(seed)
    return {name: _random(rng, name=name, shape=shape) for name, shape in shapes.items()}


def _random(rng: np.random.Generator, *, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + values / 10
    if name.endswith("bias"):
        return values / 10
    return values / np.float32(np.sqrt(shape[1]))


def _llama_config(*, vocab_size: int, context: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def add_shuffled_tokenizer(stage: Path) -> None:
    """Add a version 2 to a tokenizer stage, in which other ids stand for the texts of the vocabulary."""
    folder = shutil.copytree(stage / "1", stage / "2")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, num_special = content["model"]["vocab"], len(SPECIAL_TOKENS)
    for text, token_id in vocabulary.items():
        if token_id >= num_special:
            moved = (token_id - num_special + 101) % (len(vocabulary) - num_special)
            vocabulary[text] = num_special + moved
    _write_json(folder / "tokenizer.json", content)
