"""Merged adapters, compared with transformers' models that compute with the adapters unmerged."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from genserve.errors import ExportError
from genserve.export.adapters.adapter_reader import with_adapters
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.checkpoints.checkpoint import Checkpoint
from genserve.export.export_options import ExportFormat
from genserve.export.quantization import resolve_precision
from genserve.export.source_model import source_model
from genserve.textmodel.runtimes.onnx_logits import OnnxLogits
from tests.export.adapters import adapted_model, write_adapter
from tests.export.ggufs import write_gguf, write_gguf_adapter
from tests.export.graphs import write_graph
from tests.export.quantized_folders import AWQ, quantized_folder
from tests.export.rows import logits_of
from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint
from tests.support.command_line import invoke
from tests.support.tiny_llama import tiny_llama_checkpoint, tiny_tokenizer
from tests.support.transformers_reference import reference_logits, reference_model

MAX_DIFFERENCE = 1e-4
IDS = np.random.default_rng(1).integers(3, 320, 40)
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TIED = TINY_MODELS["llama"] | {"tie_word_embeddings": True}
BIASES = TINY_MODELS["llama_biases"]


def read(path: Path) -> Checkpoint:
    return read_checkpoint(path, source=path.name)


def merged_logits(base: Path, *adapters: Path) -> NDArray[np.float32]:
    return reference_logits(source_model(with_adapters(read(base), adapters)), IDS)


def difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(found - expected).max())


def changed_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Change a tensor of an adapter; None: remove it."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors |= {name: change(tensors[name])} if change else {}
    save_file({own: tensor for own, tensor in tensors.items() if change or own != name}, path)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (
            BIASES,
            {"targets": LINEARS, "ranks": {"1.mlp.up_proj": 2}, "alpha_pattern": {"0.self_attn.q_proj": 9}},
        ),
        pytest.param(
            BIASES, {"targets": ("q_proj", "down_proj"), "use_rslora": True, "lora_bias": True},
            marks=pytest.mark.extended,
        ),
        (BIASES, {"targets": LINEARS, "use_dora": True, "bias": "lora_only"}),
        pytest.param(
            BIASES, {"targets": ("v_proj",), "saved": ("lm_head", "embed_tokens", "1.input_layernorm")},
            marks=pytest.mark.extended,
        ),
        (BIASES, {"targets": ("embed_tokens", "lm_head"), "use_dora": True}),
        pytest.param(TIED, {"targets": ("embed_tokens", "q_proj")}, marks=pytest.mark.extended),
        pytest.param(TIED, {"targets": ("lm_head",)}, marks=pytest.mark.extended),
        (TINY_MODELS["gpt2"], {"targets": ("attn.c_attn", "attn.c_proj", "mlp.c_fc"), "use_dora": True}),
        pytest.param(
            TINY_MODELS["gpt2"], {"targets": ("attn.c_proj", "mlp.c_fc"), "fan_in_fan_out": False},
            marks=pytest.mark.extended,
        ),
        (TINY_MODELS["phi3"], {"targets": ("qkv_proj", "gate_up_proj")}),
        pytest.param(
            TINY_MODELS["falcon_grouped"], {"targets": ("query_key_value",), "use_dora": True},
            marks=pytest.mark.extended,
        ),
        (TINY_MODELS["granite"], {"targets": ("o_proj", "lm_head")}),
    ],
    ids=[
        "patterns", "rslora", "dora", "saved", "embedding", "tied_embedding", "tied_head", "conv1d",
        "square_conv1d", "fused", "grouped", "scaled",
    ],
)  # fmt: skip
def test_a_graph_of_a_merged_model_equals_the_model_with_its_adapter(
    tmp_path: Path, model: dict[str, Any], options: dict[str, Any]
) -> None:
    base = tiny_checkpoint(tmp_path / "base", **model)
    adapter = write_adapter(tmp_path / "adapter", base, **options)
    graph = write_graph(with_adapters(read(base), [adapter]), tmp_path / "graph")
    logits = logits_of(graph.logits(max_num_seqs=1, max_length=40), IDS)
    expected = reference_logits(adapted_model(base, adapter), IDS)
    assert difference(logits, expected) < MAX_DIFFERENCE
    assert difference(reference_logits(reference_model(base), IDS), expected) > 1000 * MAX_DIFFERENCE


def test_each_tensor_of_an_adapter_matters(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", **(BIASES | {"num_hidden_layers": 1}))
    options: dict[str, Any] = {"use_dora": True, "bias": "lora_only", "lora_bias": True}
    adapter = write_adapter(
        tmp_path / "adapter", base, targets=LINEARS, saved=("embed_tokens", "input_layernorm"), **options
    )
    right = merged_logits(base, adapter)
    unnoticed = []
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        changed_tensor(adapter, name, lambda values: values * 1.5)
        # A bias of the keys adds the same to all scores of a query.
        if difference(merged_logits(base, adapter), right) < MAX_DIFFERENCE and "k_proj" not in name:
            unnoticed.append(name)
        changed_tensor(adapter, name, lambda _values, tensor=tensor: tensor)
    assert unnoticed == []


@pytest.mark.parametrize("field", ["lora_alpha", "alpha_pattern", "use_rslora"])
def test_each_field_of_the_scale_matters(tmp_path: Path, field: str) -> None:
    base = tiny_llama_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=("q_proj", "up_proj"))
    changes = {"lora_alpha": 7, "alpha_pattern": {"layers.1.mlp.up_proj": 1}, "use_rslora": True}
    before = merged_logits(base, adapter)
    config = json.loads((adapter / "adapter_config.json").read_text()) | {field: changes[field]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    after = merged_logits(base, adapter)
    assert difference(after, reference_logits(adapted_model(base, adapter), IDS)) < MAX_DIFFERENCE
    assert difference(after, before) > 100 * MAX_DIFFERENCE


def test_rows_are_merged_as_they_are_read(tmp_path: Path) -> None:
    base = tiny_llama_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=("embed_tokens", "up_proj"), use_dora=True)
    checkpoint = with_adapters(read(base), [adapter])
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
        whole = checkpoint.tensor(name)
        rows = checkpoint.rows(name)
        assert rows is not None
        assert np.allclose(rows.read(7, 50), whole[7:50], atol=1e-6)


def test_adapters_are_merged_in_order(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", **TINY_MODELS["llama"])
    first = write_adapter(tmp_path / "first", base, targets=("v_proj",))
    second = write_adapter(tmp_path / "second", base, targets=("v_proj",), seed=1, use_dora=True)
    both = source_model(with_adapters(read(base), [first]))
    both.save_pretrained(tmp_path / "between")
    tiny_tokenizer(vocab_size=320).save(str(tmp_path / "between" / "tokenizer.json"))
    expected = reference_logits(adapted_model(tmp_path / "between", second), IDS)
    assert difference(merged_logits(base, first, second), expected) < MAX_DIFFERENCE
    assert difference(merged_logits(base, second, first), expected) > 100 * MAX_DIFFERENCE


def test_a_resized_vocabulary_comes_with_its_tokenizer(tmp_path: Path) -> None:
    base = tiny_llama_checkpoint(tmp_path / "base")
    larger = tiny_llama_checkpoint(tmp_path / "larger", vocab_size=330, seed=2, tie_word_embeddings=False)
    adapter = write_adapter(tmp_path / "adapter", base, targets=("q_proj",))
    path = adapter / "adapter_model.safetensors"
    resized = load_file(larger / "model.safetensors")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = load_file(path)
    save_file(tensors | {f"base_model.model.{name}": resized[name] for name in names}, path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (adapter / file).write_bytes((larger / file).read_bytes())
    checkpoint = with_adapters(read(base), [adapter])
    assert checkpoint.config["vocab_size"] == 330
    assert checkpoint.tokenizer_files["tokenizer.json"] == (larger / "tokenizer.json").read_bytes()
    assert source_model(checkpoint).lm_head.weight.shape == (330, 64)
    save_file(tensors | {f"base_model.model.{names[0]}": resized[names[0]]}, path)  # only one of the two
    with pytest.raises(ExportError, match="shape"):
        with_adapters(read(base), [adapter])


def test_an_embedding_that_stays_tied_is_the_head_too(tmp_path: Path) -> None:
    base = tiny_llama_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=("embed_tokens",), ensure_weight_tying=True)
    checkpoint = with_adapters(read(base), [adapter])
    model = source_model(checkpoint)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    assert np.array_equal(model.lm_head.weight.numpy(force=True), embedding)


GGUF_MODELS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("llama", TIED, ("q_proj", "k_proj", "down_proj", "embed_tokens")),
    ("bloom", dict(TINY_MODELS["bloom_6_heads"]), ("query_key_value", "dense")),
    ("falcon", dict(TINY_MODELS["falcon_grouped"]), ("query_key_value",)),
    ("qwen3", dict(TINY_MODELS["qwen3"]), ("q_proj", "up_proj")),
]


@pytest.mark.parametrize(("name", "model", "targets"), GGUF_MODELS, ids=[each[0] for each in GGUF_MODELS])
def test_a_gguf_adapter_changes_what_the_folder_does_that_it_was_converted_from(
    tmp_path: Path, name: str, model: dict[str, Any], targets: tuple[str, ...]
) -> None:
    del name
    base = tiny_checkpoint(tmp_path / "base", **model)
    adapter = write_adapter(tmp_path / "adapter", base, targets=targets)
    file = write_gguf_adapter(adapter, base, tmp_path / "adapter.gguf")
    base_file = write_gguf(base, tmp_path / "base.gguf")
    expected = reference_logits(adapted_model(base, adapter), IDS)
    for checkpoint, merging in [(base, file), (base_file, file), (base_file, adapter)]:
        assert difference(merged_logits(checkpoint, merging), expected) < MAX_DIFFERENCE


def test_changed_weights_of_a_quantized_file_are_rounded_and_the_others_kept(tmp_path: Path) -> None:
    base = tiny_llama_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=("q_proj",))
    checkpoint = with_adapters(read(write_gguf(base, tmp_path / "base.gguf", kind="Q4_0")), [adapter])
    assert checkpoint.load_stored("model.layers.0.self_attn.q_proj.weight") is None
    kept = checkpoint.load_stored("model.layers.0.self_attn.k_proj.weight")
    assert kept is not None
    assert kept.kind == "Q4_0"


@pytest.mark.parametrize(("targets", "precision"), [(("q_proj",), "source"), (LINEARS, "int8")])
def test_a_model_in_4_bits_stays_so_unless_an_adapter_changes_all_weights(
    tmp_path: Path, targets: tuple[str, ...], precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = tiny_llama_checkpoint(tmp_path / "base", hidden_size=64, intermediate_size=128)
    adapter = write_adapter(tmp_path / "adapter", base, targets=targets)
    quantized_folder(base, AWQ)
    checkpoint = with_adapters(read(base), [adapter])
    assert resolve_precision(None, ExportFormat.ONNX, checkpoint) == precision
    assert ("changes all quantized weights" in caplog.text) == (precision == "int8")


def test_the_command_exports_a_merged_model(tmp_path: Path) -> None:
    base = tiny_llama_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=LINEARS, use_dora=True)
    repository = tmp_path / "repository"
    flags = ["--name", "merged", "--precision", "fp32", "--model-repository", str(repository)]
    assert invoke(["export", str(base), "--adapter", str(adapter), *flags]).exit_code == 0
    logits = repository / "merged_logits" / "1"
    assert json.loads((logits / "parity.json").read_text())["top1_agreement"] == 1
    graph = OnnxLogits(logits / "model.onnx", max_num_seqs=1, max_length=40, num_threads=1)
    assert graph.metadata["genserve.source"] == "base with adapter"
    expected = reference_logits(adapted_model(base, adapter), IDS)
    assert difference(logits_of(graph, IDS), expected) < MAX_DIFFERENCE


def edited(tmp_path: Path, config: dict[str, Any]) -> tuple[Path, Path]:
    base = tiny_llama_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=("q_proj",))
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return base, adapter


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    base, adapter = edited(tmp_path, config)
    with pytest.raises(ExportError, match=named):
        with_adapters(read(base), [adapter])


@pytest.mark.parametrize(
    "config", [{"hidden_size": 32, "head_dim": 16}, {"num_hidden_layers": 1}], ids=["shape", "tensor"]
)
def test_an_adapter_of_another_model_names_the_model(tmp_path: Path, config: dict[str, Any]) -> None:
    base, adapter = edited(tmp_path, {"base_model_name_or_path": "acme/base-7b"})
    other = tiny_llama_checkpoint(tmp_path / "other", **config)
    with pytest.raises(ExportError, match=r"self_attn\.q_proj") as caught:
        with_adapters(read(other), [adapter])
    assert "acme/base-7b" in caught.value.remedy
    file = write_gguf_adapter(adapter, base, tmp_path / "adapter.gguf")
    with pytest.raises(ExportError, match="q"):
        with_adapters(read(other), [file])


@pytest.mark.parametrize("part", ["lora_A.weight", "lora_B.weight"])
def test_an_adapter_without_one_of_its_matrices_is_refused(tmp_path: Path, part: str) -> None:
    base, adapter = edited(tmp_path, {})
    changed_tensor(adapter, f"base_model.model.model.layers.0.self_attn.q_proj.{part}", None)
    with pytest.raises(ExportError, match=r"layers\.0\.self_attn\.q_proj"):
        with_adapters(read(base), [adapter])


def test_magnitudes_of_another_size_are_refused(tmp_path: Path) -> None:
    base = tiny_llama_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=("q_proj",), use_dora=True)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    changed_tensor(adapter, name, lambda values: values[1:].clone())
    with pytest.raises(ExportError, match=r"layers\.0\.self_attn\.q_proj"):
        with_adapters(read(base), [adapter])


def test_a_path_without_an_adapter_is_refused(tmp_path: Path) -> None:
    base = tiny_llama_checkpoint(tmp_path / "base")
    missing = tmp_path / "missing"
    for path in (missing, base, write_gguf(base, tmp_path / "base.gguf")):
        with pytest.raises(ExportError, match="adapter"):
            with_adapters(read(base), [path])


def test_a_gguf_adapter_of_another_architecture_is_refused(tmp_path: Path) -> None:
    base, adapter = edited(tmp_path, {})
    file = write_gguf_adapter(adapter, base, tmp_path / "adapter.gguf")
    other = tiny_checkpoint(tmp_path / "other", **TINY_MODELS["qwen3"])
    with pytest.raises(ExportError, match="'llama'"):
        with_adapters(read(other), [file])


def test_an_adapter_of_a_traced_model_is_merged_but_not_its_embedding(tmp_path: Path) -> None:
    base = tiny_checkpoint(
        tmp_path / "base", model_type="gptj", n_embd=64, n_layer=2, n_head=4, n_positions=128, rotary_dim=8
    )
    adapter = write_adapter(tmp_path / "adapter", base, targets=("q_proj", "fc_in"))
    expected = reference_logits(adapted_model(base, adapter), IDS)
    assert difference(merged_logits(base, adapter), expected) < MAX_DIFFERENCE
    head = write_adapter(tmp_path / "head", base, targets=("lm_head",))
    with pytest.raises(ExportError, match="traced"):
        with_adapters(read(base), [head])


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")  # PEFT calls what transformers deprecates
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (BIASES, {"target_modules": "all-linear", "rank_pattern": {"mlp.up_proj": 2}, "use_rslora": True}),
        (BIASES, {"target_modules": ["q_proj"], "alpha_pattern": {"1.self_attn.q_proj": 3}, "bias": "all"}),
        (BIASES, {"target_modules": "all-linear", "use_dora": True, "bias": "lora_only"}),
        (BIASES, {"target_modules": ["o_proj"], "lora_bias": True, "modules_to_save": ["lm_head", "norm"]}),
        (BIASES, {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
        (TIED, {"target_modules": ["embed_tokens", "q_proj"]}),
        (TIED, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
        (TIED, {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
        (TINY_MODELS["gpt2"], {"target_modules": "all-linear", "use_dora": True}),
        (TINY_MODELS["phi3"], {"target_modules": "all-linear"}),
    ],
)
def test_an_adapter_of_peft_gives_its_logits(
    tmp_path: Path, model: dict[str, Any], options: dict[str, Any]
) -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny_checkpoint(tmp_path / "base", **model)
    adapted = get_peft_model(reference_model(base), LoraConfig(r=4, lora_alpha=6, **options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                size = 1.0 if "magnitude" in name else 0.3
                parameter.add_(torch.empty_like(parameter).normal_(0, size, generator=generator).abs())
    adapted.save_pretrained(tmp_path / "adapter")
    expected = reference_logits(adapted.eval(), IDS)
    assert difference(merged_logits(base, tmp_path / "adapter"), expected) < 10 * MAX_DIFFERENCE
    assert difference(reference_logits(reference_model(base), IDS), expected) > 100 * MAX_DIFFERENCE
