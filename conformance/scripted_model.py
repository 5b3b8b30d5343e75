"""Scripted model: a small random text model whose decoder stage writes a fitting answer.

Its decoder stage is scripted/model.py; its chat template calls tools in the format of Hermes and Qwen.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from genserve.export import export_model
from genserve.export.export_options import SilentProgress

NAME = "scripted"
ADAPTER = f"{NAME}_adapter"
# The models for coding agents, whose first prompts have up to 20,000 tokens: see `build_agent_models`.
STRICT, SMALL = f"{NAME}_strict", f"{NAME}_24k"
_CONTEXT_TOKENS = {NAME: 131072, STRICT: 131072, SMALL: 24000}
# As the templates of Qwen 3.5 and Mistral.
_SYSTEM_FIRST = """\
{%- for message in messages[1:] %}
    {%- if message.role in ('system', 'developer') %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
{%- endfor %}
"""
_SOURCES = Path(__file__).with_name("scripted")
# The tokens of the tool format, which the default model's tokenizer lacks; not special, as in Qwen's.
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def build_scripted_model(repository: Path, *, tokenizer: Path, name: str = NAME) -> None:
    """Write the stages of the model into a repository if they are missing, and rewrite their sources.

    A model of the name NAME gets an adapter, of the name ADAPTER.

    Args:
        repository: the folder of the repository.
        tokenizer: the folder of the default model's tokenizer stage, whose vocabulary has ChatML's tokens.
        name: the name, which says the context and the template.
    """
    if not (repository / f"{name}_logits" / "1" / "model.onnx").exists():
        with TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "checkpoint"
            _write_checkpoint(checkpoint, tokenizer=tokenizer, context_tokens=_CONTEXT_TOKENS[name])
            export_model(
                str(checkpoint), repository=repository, name=name, precision="fp32", progress=SilentProgress()
            )
    shutil.copy(_SOURCES / "model.py", repository / f"{name}_decoder" / "1")
    template = (_SOURCES / "chat_template.jinja").read_text(encoding="utf-8")
    written = repository / f"{name}_tokenizer" / "1" / "chat_template.jinja"
    written.write_text(_SYSTEM_FIRST + template if name == STRICT else template, encoding="utf-8")
    if name == NAME:
        _write_adapter(repository / ADAPTER)


def build_agent_models(repository: Path, *, tokenizer: Path) -> None:
    """Write three scripted models: one with a long context, STRICT with a strict template, SMALL with 24k."""
    for name in (NAME, STRICT, SMALL):
        build_scripted_model(repository, tokenizer=tokenizer, name=name)


def _write_checkpoint(folder: Path, *, tokenizer: Path, context_tokens: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    contents = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    vocab_size = len(contents["model"]["vocab"])
    plain = contents["added_tokens"][0] | {"special": False}
    tags = [plain | {"id": vocab_size + i, "content": tag} for i, tag in enumerate(_TAGS)]
    contents["added_tokens"] += tags
    config = LlamaConfig(
        vocab_size=vocab_size + len(_TAGS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    shutil.copy(_SOURCES / "chat_template.jinja", folder)
    (folder / "tokenizer.json").write_text(json.dumps(contents), encoding="utf-8")


def _write_adapter(folder: Path) -> None:
    """Write a random adapter of the model `NAME`."""
    random = np.random.default_rng(0)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{module}.lora_A.weight": (4, 64), f"{module}.lora_B.weight": (64, 4)}
    tensors = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    save_file(tensors, version / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (version / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    base = f'parameters {{ key: "base_model" value: {{ string_value: "{NAME}" }} }}\n'
    (folder / "config.pbtxt").write_text(f'backend: "adapter"\n{base}', encoding="utf-8")
