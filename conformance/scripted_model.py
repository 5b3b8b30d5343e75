"""Scripted model: a small random text model whose decoder stage writes a fitting answer.

Its decoder stage is scripted/model.py; its chat template calls tools in the format of Hermes and Qwen.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from genserve.export import export_model
from genserve.export.export_options import SilentProgress

NAME = "scripted"
CONTEXT_TOKENS = 16384
_SOURCES = Path(__file__).with_name("scripted")
# Tokens that the default model's tokenizer lacks, and those of this format are; not special, as in Qwen's.
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def build_scripted_model(repository: Path, *, tokenizer: Path) -> None:
    """Write the stages of the model into a repository, unless they are there; the sources are written anew.

    Args:
        repository: its folder.
        tokenizer: the folder of a tokenizer stage with a ChatML vocabulary, that of the default model.
    """
    if not (repository / f"{NAME}_logits" / "1" / "model.onnx").exists():
        with TemporaryDirectory() as folder:
            checkpoint = Path(folder) / "checkpoint"
            _write_checkpoint(checkpoint, tokenizer=tokenizer)
            export_model(
                str(checkpoint), repository=repository, name=NAME, precision="fp32", progress=SilentProgress()
            )
    shutil.copy(_SOURCES / "model.py", repository / f"{NAME}_decoder" / "1")
    shutil.copy(_SOURCES / "chat_template.jinja", repository / f"{NAME}_tokenizer" / "1")


def _write_checkpoint(folder: Path, *, tokenizer: Path) -> None:
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
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    shutil.copy(_SOURCES / "chat_template.jinja", folder)
    (folder / "tokenizer.json").write_text(json.dumps(contents), encoding="utf-8")
