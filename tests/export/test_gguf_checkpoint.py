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
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.checkpoints.expert_tensors import with_stacks
from genserve.export.decoder import Attention, Decoder, LinearAttention, Rotary
from genserve.export.families import family_of
from genserve.export.families.family import Unsupported
from genserve.export.gguf.gguf_file import GgufFile
from genserve.export.known_models import SMOLLM2_FILE
from genserve.export.pulling import cache_folder
from tests.export.ggufs import write_gguf
from tests.export.graphs import write_graph
from tests.export.rows import logits_of
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.support.representatives import with_extended
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


# Windows that the converter does not write, or more layers than a period has.
_CONVERTED = {
    "gemma3": TINY_MODELS["gemma3"]
    | {
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 32,
    },
    "gemma2": TINY_MODELS["gemma2"] | {"query_pre_attn_scalar": 32},
    "gemma3n": TINY_MODELS["gemma3n"] | {"vocab_size_per_layer_input": 320},
    "llama4": TINY_MODELS["llama4"]
    | {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    "ministral3": TINY_MODELS["ministral3"]
    | {
        "sliding_window": None,
        "rope_parameters": TINY_MODELS["ministral3"]["rope_parameters"] | {"mscale_all_dim": 1.0},
    },
    "deepseek_v2": TINY_MODELS["deepseek_v2"]
    | {"rope_parameters": TINY_MODELS["deepseek_v2"]["rope_parameters"] | {"mscale": 0.9}},
    # The converter multiplies the weights by the scales.
    "falcon_h1": TINY_MODELS["falcon_h1_no_norm"] | {"time_step_limit": [0.0, float("inf")]},
    "granite4_h": TINY_MODELS["granite4_h"] | {"position_embedding_type": "nope"},
    "lfm2_moe": TINY_MODELS["lfm2_moe"] | {"routed_scaling_factor": 1.0},
    "glm4_moe": TINY_MODELS["glm4_moe"] | {"num_nextn_predict_layers": 1},
    "mixtral": TINY_MODELS["mixtral"] | {"sliding_window": None},
    "olmo": TINY_MODELS["olmo"] | {"attention_bias": False},
    "olmoe": TINY_MODELS["olmoe"] | {"clip_qkv": None, "attention_bias": False},
    "starcoder2": TINY_MODELS["starcoder2"] | {"sliding_window": None},
    "phimoe": TINY_MODELS["phimoe"] | {"router_jitter_noise": 0.01},
    "qwen2_moe": TINY_MODELS["qwen2_moe"] | {"decoder_sparse_step": 1},
    "qwen3_next": TINY_MODELS["qwen3_next"] | {"mlp_only_layers": []},
    "qwen3_moe": TINY_MODELS["qwen3_moe"] | {"mlp_only_layers": []},
    "qwen2": TINY_MODELS["qwen2"] | {"use_sliding_window": False},
    "smollm3": TINY_MODELS["smollm3"] | {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
}

# Whose numbers the converter changes.
_ROUNDED = ("falcon_h1", "gemma", "granite4_h", "nemotron", "qwen3_5")


@pytest.mark.parametrize(
    "model",
    with_extended(
        [
            "deepseek_v2", "deepseek_v3", "granite4_h", "granite4_h_experts", "lfm2_moe",
            "nemotron_h", "nemotron_h_experts", "qwen3_next",
        ],
        always={"deepseek_v2", "qwen3_next"},
    ),
)  # fmt: skip
def test_a_file_whose_tensors_are_apart_has_the_same_graph(tmp_path: Path, model: str) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **(TINY_MODELS | _CONVERTED)[model])
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    graphs = [write_graph(each, tmp_path / name) for name, each in (("file", file), ("folder", folder))]
    found, expected = (
        logits_of(graph.logits(max_num_seqs=1, max_length=64), range(3, 64)) for graph in graphs
    )
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (
            "deepseek_v3",
            {"key_length": 24, "value_length": 20, "key_length_mla": None, "value_length_mla": None},
        ),
        ("qwen3_next", {}),
    ],
)
def test_the_tensors_that_older_files_have_whole_are_read(
    tmp_path: Path, model: str, sizes: dict[str, int | None]
) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **(TINY_MODELS | _CONVERTED)[model])
    metadata = {f"deepseek2.attention.{name}": value for name, value in sizes.items()}
    files = [
        write_gguf(folder, tmp_path / "apart.gguf"),
        write_gguf(folder, tmp_path / "whole.gguf", whole=True, **metadata),
    ]
    found, expected = (
        logits_of(write_graph(file, tmp_path / file.stem).logits(max_num_seqs=1, max_length=9), range(3, 12))
        for file in files
    )
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "model",
    with_extended(
        ["gemma3n", "gemma4", "gpt_oss", "granite4_h", "llama", "llama_biases", "qwen2", "qwen3_5"],
        always={"llama_biases", "qwen3_5"},
    ),
)
def test_queries_keys_and_values_may_be_one_tensor(tmp_path: Path, model: str) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **(TINY_MODELS | _CONVERTED)[model])
    paths = [
        write_gguf(folder, tmp_path / f"{fused}.gguf", kind="Q8_0", fused_qkv=fused)
        for fused in (True, False)
    ]
    assert any(name.endswith(".attn_qkv.weight") for name in GgufFile.open(paths[0]).tensors)
    assert not any(name.endswith(".attn_k.weight") for name in GgufFile.open(paths[0]).tensors)
    found, expected = (read_checkpoint(path, source="tiny") for path in paths)
    assert found.config == expected.config
    assert found.tensor_names == expected.tensor_names
    for name in expected.tensor_names:
        assert np.array_equal(found.load(name, slice(None)), expected.load(name, slice(None))), name


@pytest.mark.parametrize(
    "model",
    with_extended(
        [
            "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe_shared", "lfm2_moe", "llama4", "minimax_m2",
            "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
        ],
        always={"gpt_oss"},
    ),
)  # fmt: skip
def test_gates_and_values_of_experts_may_be_one_tensor(tmp_path: Path, model: str) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **(TINY_MODELS | _CONVERTED)[model])
    sources = [write_gguf(folder, tmp_path / "f32.gguf", fused=True), folder]
    graphs = [write_graph(each, tmp_path / str(index)) for index, each in enumerate(sources)]
    logits = [logits_of(graph.logits(max_num_seqs=1, max_length=64), range(3, 64)) for graph in graphs]
    assert np.array_equal(*logits)

    found, expected = (
        read_checkpoint(
            write_gguf(folder, tmp_path / f"{fused}.gguf", kind="Q8_0", fused=fused), source="tiny"
        )
        for fused in (True, False)
    )
    assert found.tensor_names == expected.tensor_names
    assert found.num_bytes == expected.num_bytes
    for name in expected.tensor_names:
        stored = [file.load_stored(name) for file in (found, expected)]
        rows = [each and each.rows.whole().tobytes() for each in stored]
        assert rows[0] == rows[1], name


def test_the_parts_of_a_quantized_tensor_keep_its_codes(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **(TINY_MODELS | _CONVERTED)["qwen3_next"])
    file = read_checkpoint(write_gguf(folder, tmp_path / "tiny.gguf", kind="Q8_0"), source="tiny")
    name = "model.layers.0.linear_attn.in_proj_a.weight"
    stored, number = file.load_stored(name), gguf.GGMLQuantizationType.Q8_0
    assert stored is not None
    assert stored.kind == "Q8_0"
    # The steps of two heads of values follow their betas, for each of two heads of keys.
    whole = read_checkpoint(folder, source="tiny").tensor(name.replace("in_proj_a", "in_proj_ba"))
    assert np.array_equal(stored.rows.whole(), gguf.quantize(whole, number)[[2, 3, 6, 7]])
    assert np.array_equal(file.tensor(name), gguf.dequantize(stored.rows.whole(), number))


@pytest.mark.parametrize(
    "model",
    with_extended(
        [
            "arcee", "bloom_6_heads", "cohere", "cohere2", "cohere_head_norms", "deepseek_v2",
            "deepseek_v3", "ernie4_5", "exaone4", "ernie4_5_moe", "exaone4_full", "falcon_grouped",
            "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4",
            "gemma4_experts", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_neox_odd",
            "gpt_neox_serial", "gpt_oss", "granite", "granite4_h", "granite4_h_experts", "granitemoe",
            "granitemoe_shared", "lfm2", "lfm2_moe", "llama4", "llama_biases", "llama_linear_rope",
            "llama_yarn_rope", "minimax_m2", "ministral3", "mixtral", "nemotron", "nemotron_h",
            "nemotron_h_experts", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "phi3_longrope", "phi_plain",
            "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "seed_oss",
            "smollm3", "stablelm", "starcoder2",
        ],
        always={
            "bloom_6_heads", "falcon_grouped", "gemma2", "gpt2", "gpt_oss", "llama_yarn_rope", "mixtral",
            "qwen3_5", "gemma4_experts",
        },
    ),
)  # fmt: skip
def test_the_files_of_other_families_are_read_like_their_folders(tmp_path: Path, model: str) -> None:
    models = TINY_MODELS | _CONVERTED
    folder = tiny_checkpoint(tmp_path / "tiny", **models[model])
    family = family_of(read_checkpoint(folder, source="tiny").config)
    assert family is not None
    expected = with_stacks(family.completed(read_checkpoint(folder, source="tiny")))
    file = family.completed(read_checkpoint(write_gguf(folder, tmp_path / "tiny.gguf"), source="tiny"))
    found = with_stacks(file, transposed=family.transposed_stacks)
    # llama.cpp's converter may write a tied head as another tensor, and stacks become the tensors of experts.
    apart = (".experts.", ".k_b_proj.", ".shared_mlp.", ".v_b_proj.")
    added = found.tensor_names - expected.tensor_names
    others = {name for name in added if not any(part in name for part in apart)}
    assert others <= {"lm_head.weight"}
    for name in expected.tensor_names:
        # Norms of Gemma are stored as 1 + weight, and A_log as its exponential, which rounds.
        rounded = 1e-6 if model.startswith(_ROUNDED) else 0.0
        assert np.allclose(found.tensor(name), expected.tensor(name), rtol=0, atol=rounded), name
    assert decoder_of(found) == decoder_of(expected)


def test_the_divisors_of_llama_3s_frequencies_are_read(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **TINY_MODELS["llama_llama3_rope"])
    expected = decoder_of(read_checkpoint(folder, source="tiny"))
    found = decoder_of(read_checkpoint(write_gguf(folder, tmp_path / "tiny.gguf"), source="tiny"))
    [mine], [theirs] = found.rotaries, expected.rotaries
    assert mine.frequencies == pytest.approx(theirs.frequencies, rel=1e-6)
    assert mine.frequencies != pytest.approx([500.0 ** (-i / 8) for i in range(8)], rel=0.1)
    assert mine.scale == theirs.scale
    assert found.context_length == expected.context_length


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q8_0"])
def test_quantized_rows_are_put_in_order_before_they_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **TINY_MODELS["llama"])
    caplog.set_level("INFO")
    found = read_checkpoint(write_gguf(folder, tmp_path / "tiny.gguf", kind=kind), source="tiny")
    assert any(kind in record.getMessage() for record in caplog.records) == (kind != "F16")
    name, number = "model.layers.1.self_attn.k_proj.weight", gguf.GGMLQuantizationType[kind]
    weight = read_checkpoint(folder, source="tiny").tensor(name)
    assert np.array_equal(found.tensor(name), gguf.dequantize(gguf.quantize(weight, number), number))


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
        "add_eos_token": False,
    }


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "kimi-k2"),
    ],
)
def test_unsupported_metadata_is_rejected_by_name(
    tmp_path: Path, metadata: dict[str, str], what: str
) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "tiny")
    with pytest.raises(ExportError, match=what) as caught:
        read_checkpoint(write_gguf(folder, tmp_path / "tiny.gguf", **metadata), source="tiny")
    assert "original checkpoint" in caught.value.remedy


@pytest.mark.parametrize(
    ("model", "metadata", "what"),
    [
        ("deepseek_v3", {"deepseek2.attention.temperature_scale": 0.1}, "temperature_scale"),
        ("deepseek_v2", {"deepseek2.expert_weights_norm": True}, "expert_weights_norm"),
        ("nemotron_h_experts", {"nemotron_h_moe.moe_latent_size": 16}, "moe_latent_size"),
    ],
)
def test_what_no_graph_computes_is_rejected_by_name(
    tmp_path: Path, model: str, metadata: dict[str, object], what: str
) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **(TINY_MODELS | _CONVERTED)[model])
    path = write_gguf(folder, tmp_path / "tiny.gguf", **metadata)
    with pytest.raises(Unsupported, match=what):
        decoder_of(read_checkpoint(path, source="tiny"))


@pytest.mark.parametrize(
    ("architecture", "key", "reason"),
    [
        ("dbrx", "expert_count", "a mixture of experts"),
        ("grok", "expert_count", "a mixture of experts"),
        ("mamba", "ssm.conv_kernel", "recurrent state"),
        ("jamba", "ssm.conv_kernel", "recurrent state"),
        ("rwkv6", "wkv.head_size", "recurrent state"),
    ],
)
def test_the_remedy_does_not_lead_to_a_checkpoint_that_is_refused_too(
    tmp_path: Path, architecture: str, key: str, reason: str
) -> None:
    writer = gguf.GGUFWriter(path := tmp_path / "it.gguf", architecture)
    writer.add_uint32(f"{architecture}.{key}", 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ExportError, match=f"architecture {architecture} with .*{reason}") as caught:
        read_checkpoint(path, source="it")
    assert "the nearest that works: " in caught.value.remedy


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
    "name", ["context_length", "attention.head_count", "attention.layer_norm_rms_epsilon"]
)
def test_missing_metadata_is_named(tmp_path: Path, name: str) -> None:
    folder, key = tiny_llama_checkpoint(tmp_path / "tiny"), f"llama.{name}"
    with pytest.raises(ExportError, match=f"lacks '{key}'"):
        read_checkpoint(write_gguf(folder, tmp_path / "tiny.gguf", **{key: None}), source="tiny")


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        ("granite4_h", "granitehybrid.attention.head_count_kv", 2),
        ("granite4_h", "granitehybrid.ssm.time_step_rank", 0),
        ("granite4_h", "granitehybrid.ssm.inner_size", "x"),
        ("qwen3_5", "qwen35.ssm.group_count", 3),
    ],
)
def test_metadata_that_fit_no_model_are_rejected(
    tmp_path: Path, model: str, field: str, value: object
) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", **TINY_MODELS[model])
    path = write_gguf(folder, tmp_path / "tiny.gguf", **{field: value})
    with pytest.raises(ExportError, match=r"tiny\.gguf has metadata that describe no model of its arch"):
        read_checkpoint(path, source="tiny")


@pytest.mark.parametrize(("left_out", "name"), [("add_token_list", "tokens"), ("add_token_merges", "merges")])
def test_a_missing_part_of_the_tokenizer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str, name: str
) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, left_out, lambda *_args: None)
    path = write_gguf(tiny_llama_checkpoint(tmp_path / "tiny"), tmp_path / "tiny.gguf")
    with pytest.raises(ExportError, match=f"lacks 'tokenizer.ggml.{name}'"):
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
    with pytest.raises(ExportError, match="tokenizer of tiny"):
        read_checkpoint(path, source="tiny")


@pytest.mark.slow
def test_the_default_model_is_read_as_transformers_reads_it() -> None:
    path = cache_folder() / SMOLLM2_FILE.name
    if not path.exists():
        pytest.skip("the default model is not in the cache: `genserve pull smollm2` brings it")
    from transformers import LlamaForCausalLM

    checkpoint = read_checkpoint(path, source="tiny")
    model = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=SMOLLM2_FILE.name)
    expected = {name: value.numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert checkpoint.tensor_names == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(checkpoint.tensor(name), value), name


def decoder_of(checkpoint: Checkpoint) -> Decoder:
    """The decoder, rounded: GGUF files store numbers in single precision."""
    family = family_of(checkpoint.config)
    assert family is not None
    decoder = family.decoder(checkpoint.config)
    layers = [replace(layer, attention=rounded_attention(layer.attention)) for layer in decoder.layers]
    for index, layer in enumerate(layers):
        if layer.gate_cutoff is not None:
            layers[index] = replace(layer, gate_cutoff=round(layer.gate_cutoff, 4))
        if isinstance(layer.mixer, LinearAttention):
            mixer = replace(layer.mixer, norm_epsilon=float(f"{layer.mixer.norm_epsilon:.5g}"))
            layers[index] = replace(layer, mixer=mixer)
    names = ("norm_epsilon", "residual_scale", "logits_scale", "embedding_scale")
    scales = {name: value and float(f"{value:.5g}") for name in names for value in [getattr(decoder, name)]}
    per_layer = decoder.per_layer
    if per_layer is not None:
        per_layer = replace(per_layer, norm_epsilon=float(f"{per_layer.norm_epsilon:.5g}"))
    return replace(decoder, layers=tuple(layers), per_layer=per_layer, **scales)


def rounded_attention(attention: Attention | None) -> Attention | None:
    if attention is None:
        return None
    growth = attention.query_scale
    return replace(
        attention,
        rotary=rounded(attention.rotary),
        scale=round(attention.scale, 5),
        query_scale=growth and replace(growth, beta=round(growth.beta, 5)),
    )


def rounded(rotary: Rotary | None) -> Rotary | None:
    if rotary is None:
        return None
    frequencies = tuple(float(f"{frequency:.5g}") for frequency in rotary.frequencies)
    return replace(rotary, frequencies=frequencies, scale=round(rotary.scale, 5))
