"""GGUF files, compared with the checkpoint folders they were made from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from genserve.errors import ExportError
from genserve.export.checkpoint import Checkpoint
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.decoder import Decoder
from genserve.export.families import family_of
from genserve.export.pulling import FILE, cache_folder
from tests.export.ggufs import write_gguf
from tests.export.graphs import write_graph
from tests.export.rows import logits_of
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.support.tiny_llama import CHAT_TEMPLATE, tiny_llama_checkpoint


@pytest.mark.parametrize(
    "config", [{}, {"tie_word_embeddings": False}, {"attention_bias": True}], ids=["tied", "untied", "bias"]
)
def test_a_gguf_file_gives_the_graph_of_the_folder_that_it_was_made_from(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "tiny", **config)
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    expected = write_graph(folder, tmp_path / "from_folder")
    found = write_graph(file, tmp_path / "from_file")
    assert found.dimensions == expected.dimensions
    logits = [
        logits_of(graph.logits(max_num_seqs=1, max_length=100), range(3, 100)) for graph in (found, expected)
    ]
    assert np.array_equal(*logits)


@pytest.mark.parametrize("model", ["bloom_6_heads", "gpt2", "llama_biases", "qwen2_all", "qwen3"])
def test_the_files_of_other_families_are_read_like_their_folders(tmp_path: Path, model: str) -> None:
    models = TINY_MODELS | {"qwen2_all": TINY_MODELS["qwen2"] | {"use_sliding_window": False}}
    folder = tiny_checkpoint(tmp_path / "tiny", **models[model])
    expected = read_checkpoint(folder, source="tiny")
    found = read_checkpoint(write_gguf(folder, tmp_path / "tiny.gguf"), source="tiny")
    # llama.cpp's converter may write a tied head as another tensor.
    assert found.tensor_names - expected.tensor_names <= {"lm_head.weight"}
    for name in expected.tensor_names:
        assert np.array_equal(found.tensor(name), expected.tensor(name)), name
    assert decoder_of(found) == decoder_of(expected)


def test_the_tokenizer_files_are_those_of_a_checkpoint_folder(tmp_path: Path) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "tiny")
    files = read_checkpoint(write_gguf(folder, tmp_path / "tiny.gguf"), source="tiny").tokenizer_files
    assert files["chat_template.jinja"].decode() == CHAT_TEMPLATE
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [2]
    assert json.loads(files["tokenizer_config.json"]) == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "add_bos_token": False,
    }


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"llama.rope.scaling.type": "yarn"}, "rotary"),
        ({"tokenizer.ggml.model": "llama"}, "'llama' tokenizer"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "deepseek-llm"),
    ],
)
def test_unsupported_metadata_is_rejected_by_name(
    tmp_path: Path, metadata: dict[str, str], what: str
) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "tiny")
    with pytest.raises(ExportError, match=what) as caught:
        read_checkpoint(write_gguf(folder, tmp_path / "tiny.gguf", **metadata), source="tiny")
    assert "original checkpoint" in caught.value.remedy


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 100])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ExportError, match=r"broken\.gguf"):
        read_checkpoint(path, source="tiny")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = write_gguf(tiny_llama_checkpoint(tmp_path / "tiny"), tmp_path / "cut.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ExportError, match=r"cut\.gguf"):
        read_checkpoint(path, source="tiny")


@pytest.mark.parametrize(
    ("left_out", "name"),
    [
        ("add_context_length", r"llama\.context_length"),
        ("add_head_count", r"llama\.attention\.head_count"),
        ("add_token_list", r"tokenizer\.ggml\.tokens"),
        ("add_token_merges", r"tokenizer\.ggml\.merges"),
    ],
)
def test_missing_metadata_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str, name: str
) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, left_out, lambda *_args: None)
    path = write_gguf(tiny_llama_checkpoint(tmp_path / "tiny"), tmp_path / "tiny.gguf")
    with pytest.raises(ExportError, match=f"lacks '{name}'"):
        read_checkpoint(path, source="tiny")


@pytest.mark.parametrize(
    ("broken", "value"),
    [("add_bos_token_id", 99_999), ("add_token_merges", ["a b c"]), ("add_token_merges", ["zzz qqq"])],
)
def test_an_inconsistent_tokenizer_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, value: object
) -> None:
    write = getattr(gguf.GGUFWriter, broken)
    monkeypatch.setattr(gguf.GGUFWriter, broken, lambda writer, _right: write(writer, value))
    path = write_gguf(tiny_llama_checkpoint(tmp_path / "tiny"), tmp_path / "tiny.gguf")
    with pytest.raises(ExportError, match="the tokenizer of tiny is broken"):
        read_checkpoint(path, source="tiny")


@pytest.mark.slow
def test_the_default_model_is_read_as_transformers_reads_it() -> None:
    path = cache_folder() / FILE
    if not path.exists():
        pytest.skip("the default model is not in the cache: `genserve pull smollm2` brings it")
    from transformers import LlamaForCausalLM

    checkpoint = read_checkpoint(path, source="tiny")
    model = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=FILE)
    expected = {name: value.numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert checkpoint.tensor_names == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(checkpoint.tensor(name), value), name


def decoder_of(checkpoint: Checkpoint) -> Decoder:
    family = family_of(checkpoint.config)
    assert family is not None
    decoder = family.decoder(checkpoint.config)
    # GGUF files store numbers in single precision.
    return replace(decoder, norm_epsilon=float(np.float32(decoder.norm_epsilon)))
