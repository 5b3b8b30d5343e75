"""Encoders as they are exported, asked over HTTP, against transformers and the pooling of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from genserve.errors import ExportError
from genserve.export import KNOWN_ENCODERS, SilentProgress, is_encoder, pull_encoder
from genserve.export.encoders.encoder import export_encoder
from genserve.export.pulling import cache_folder, fetch_checkpoint
from tests.support.command_line import invoke
from tests.support.live_server import LiveServer

_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "vocab_size": 60, "pad_token_id": 1,
}  # fmt: skip
_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
_OPTIONS = {
    "modernbert": {"local_attention": 8},   # tokens, in every other layer
    "qwen3": _HEADS,
    # As EmbeddingGemma.
    "gemma3_text": _HEADS | {
        "use_bidirectional_attention": True, "sliding_window": 8, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
TEXTS = ["a b c d e f g", "h", "i j k", "l m n o p q r s t u v w x y z a b c"]
POOLINGS = {
    "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken",
}  # fmt: skip


def checkpoint(
    folder: Path, model_type: str, *, kind: Any = AutoModel, modules: Sequence[str] = (), **config: Any
) -> Path:
    """Write a checkpoint with random weights, a tokenizer of letters, and sentence-transformers' modules."""
    torch.manual_seed(0)
    made = AutoConfig.for_model(model_type, **_SIZES, **_OPTIONS.get(model_type, {}), **config, num_labels=1)
    kind.from_config(made).save_pretrained(folder)
    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 2)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    types = [{"type": f"sentence_transformers.models.{module}"} for module in modules]
    (folder / "modules.json").write_text(json.dumps(types))
    return folder


def write_pooling(folder: Path, **pooling: bool) -> None:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def write_dense(source: Path, *layers: torch.nn.Linear, activation: str) -> None:
    """Write the modules Transformer, Pooling, Dense for each layer, and Normalize."""
    types = ["Transformer", "Pooling", *["Dense"] * len(layers), "Normalize"]
    modules = [
        {"type": f"sentence_transformers.models.{name}", "path": f"{index}_{name}" if index else ""}
        for index, name in enumerate(types)
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    for index, layer in enumerate(layers, 2):
        folder = source / f"{index}_Dense"
        folder.mkdir()
        config = {
            "in_features": layer.in_features, "out_features": layer.out_features,
            "bias": layer.bias is not None, "activation_function": f"torch.nn.modules.{activation}",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        weights = {f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}
        save_file(weights, folder / "model.safetensors")


def exported(source: Path, repository: Path, *, precision: Any = None, pooling: Any = None) -> dict[str, Any]:
    """Export as m, and return its parity."""
    assert pooling or is_encoder(str(source))
    export_encoder(
        source, repository=repository, name="m", precision=precision, pooling=pooling,
        progress=SilentProgress(),
    )  # fmt: skip
    parity: dict[str, Any] = json.loads((repository / "m_encoder" / "1" / "parity.json").read_text())
    return parity


def vectors_of(repository: Path, texts: Sequence[str] = TEXTS, **fields: str) -> Any:
    with LiveServer(repository) as server:
        body = {"model": "m", "input": texts} | fields
        answer = httpx2.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
    return np.array([item["embedding"] for item in answer.json()["data"]])


def source_output(source: Path, kind: Any, *text: str) -> Any:
    """What transformers computes for a text, or a pair of texts, without padding."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_padding()      # tokenizer.json may pad and truncate, which sentence-transformers overrides
    tokenizer.no_truncation()
    encoding = tokenizer.encode(*text)
    model = kind.from_pretrained(source).eval()
    inputs = {"input_ids": torch.tensor([encoding.ids])}
    if model.config.model_type == "bert":
        inputs["token_type_ids"] = torch.tensor([encoding.type_ids])
    with torch.inference_mode():
        return model(**inputs)


@pytest.mark.parametrize(
    ("model_type", "pooling", "normalizes"),
    [
        ("bert", "mean", True),
        pytest.param("roberta", "cls", False, marks=pytest.mark.extended),
        pytest.param("xlm-roberta", "mean", False, marks=pytest.mark.extended),
        pytest.param("mpnet", "last", True, marks=pytest.mark.extended),
        pytest.param("modernbert", "cls", False, marks=pytest.mark.extended),
        pytest.param("qwen3", "last", True, marks=pytest.mark.extended),
    ],
)  # fmt: skip
def test_vectors_are_those_of_transformers(
    tmp_path: Path, model_type: str, pooling: str, normalizes: bool
) -> None:
    modules = ["Transformer", "Pooling", *["Normalize"] * normalizes]
    source = checkpoint(tmp_path / "source", model_type, modules=modules)
    write_pooling(source, **{key: name == pooling for name, key in POOLINGS.items()})
    parity = exported(source, tmp_path / "repository")
    assert parity["largest_difference"] <= 1e-5
    assert parity["precision"] == "fp32"
    expected = [pooled(source, text, pooling) for text in TEXTS]
    if normalizes:
        expected = [vector / np.linalg.norm(vector) for vector in expected]
    np.testing.assert_allclose(vectors_of(tmp_path / "repository"), expected, atol=1e-5, rtol=0)


def pooled(source: Path, text: str, pooling: str) -> Any:
    states = source_output(source, AutoModel, text).last_hidden_state[0].numpy()
    return {"mean": states.mean(axis=0), "cls": states[0], "last": states[-1]}[pooling]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("pooling", "activation"),
    [("mean", "linear.Identity"), ("last", "activation.Tanh"), ("cls", "linear.Identity")],
)
def test_layers_behind_the_pooling_and_prompts_of_a_checkpoint(
    tmp_path: Path, pooling: str, activation: str
) -> None:
    source = checkpoint(tmp_path / "source", "gemma3_text")
    write_pooling(source, **{key: name == pooling for name, key in POOLINGS.items()})
    layers = torch.nn.Linear(32, 40, bias=False), torch.nn.Linear(40, 24)
    write_dense(source, *layers, activation=activation)
    prompts = {"query": 'a "b" 🙂 ', "document": "c\n"}
    stated = {"prompts": prompts, "default_prompt_name": "document"}
    (source / "config_sentence_transformers.json").write_text(json.dumps(stated))
    assert exported(source, tmp_path / "repository")["largest_difference"] <= 1e-5
    for name, prompt in prompts.items():
        expected = []
        for text in TEXTS:
            vector = torch.from_numpy(pooled(source, prompt + text, pooling))
            with torch.inference_mode():
                for layer in layers:
                    vector = layer(vector)
                    vector = torch.tanh(vector) if activation.endswith("Tanh") else vector
            expected.append((vector / vector.norm()).numpy())
        fields = {"prompt_name": "query"} if name == "query" else {}
        vectors = vectors_of(tmp_path / "repository", **fields)
        np.testing.assert_allclose(vectors, np.stack(expected), atol=1e-5, rtol=0)


@pytest.mark.extended
@pytest.mark.parametrize("model_type", ["bert", "mpnet", "modernbert", "qwen3", "gemma3_text"])
def test_int8_is_near_the_source(tmp_path: Path, model_type: str) -> None:
    source = checkpoint(tmp_path / "source", model_type, modules=["Transformer", "Pooling", "Normalize"])
    parity = exported(source, tmp_path / "repository", precision="int8")
    assert parity["largest_difference"] > 1e-5      # it is quantized
    assert parity["correlation"] > 0.9
    expected = np.stack([pooled(source, text, "mean") for text in TEXTS])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    cosines = np.vecdot(vectors_of(tmp_path / "repository"), expected)
    assert 0.99 < cosines.min() <= cosines.max() < 1 + 1e-6
    graph = onnx.load(tmp_path / "repository" / "m_encoder" / "1" / "model.onnx", load_external_data=False)
    weights = {tensor.name for tensor in graph.graph.initializer if len(tensor.dims) == 2}
    assert not [node for node in graph.graph.node if node.op_type == "MatMul" and weights & {*node.input}]


@pytest.mark.extended
def test_the_last_hidden_states_of_a_model_that_generates_text(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "llama", kind=AutoModelForCausalLM)
    (source / "modules.json").unlink()
    assert not is_encoder(str(source))
    assert exported(source, tmp_path / "repository", pooling="last")["largest_difference"] <= 1e-5
    expected = [pooled(source, text, "last") for text in TEXTS]
    np.testing.assert_allclose(vectors_of(tmp_path / "repository"), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_vectors_of_a_pulled_model_are_those_of_its_checkpoint(tmp_path: Path) -> None:
    encoder = KNOWN_ENCODERS["all-minilm-l6-v2"]
    pull_encoder(encoder, repository=tmp_path, progress=SilentProgress())
    long = " ".join(["The sea is calm."] * 40)      # longer than tokenizer.json truncates, shorter than 256
    texts = ["What is the capital of France?", "Paris.", long, "\u4f60\u597d caf\u00e9"]
    with LiveServer(tmp_path) as server:
        answer = httpx2.post(
            f"{server.url}/v1/embeddings", json={"model": encoder.name, "input": texts}, timeout=60
        )
    source = fetch_checkpoint(cache_folder(), encoder)
    expected = []
    for text in texts:
        mean = source_output(source, AutoModel, text).last_hidden_state[0].numpy().mean(axis=0)
        expected.append(mean / np.linalg.norm(mean))
    vectors = [item["embedding"] for item in answer.json()["data"]]
    np.testing.assert_allclose(vectors, np.stack(expected), atol=1e-5, rtol=0)


@pytest.mark.extended
@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta"])
def test_scores_are_those_of_transformers(tmp_path: Path, model_type: str, activation: str) -> None:
    kind = AutoModelForSequenceClassification
    stated = {"sbert_ce_default_activation_function": f"torch.nn.modules.linear.{activation}"}
    source = checkpoint(tmp_path / "source", model_type, kind=kind, **stated)
    exported(source, tmp_path / "repository")
    body = {"model": "m", "text_1": "a b", "text_2": TEXTS}
    with LiveServer(tmp_path / "repository") as server:
        answer = httpx2.post(f"{server.url}/v1/score", json=body, timeout=60)
    scores = [item["score"] for item in answer.json()["data"]]
    logits = torch.stack([source_output(source, kind, "a b", text).logits[0, 0] for text in TEXTS])
    expected = logits if activation == "Identity" else torch.sigmoid(logits)
    np.testing.assert_allclose(scores, expected, atol=1e-5, rtol=0)


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "bert", modules=["Transformer", "Pooling", "LSTM"])
    with pytest.raises(ExportError, match="LSTM"):
        exported(source, tmp_path / "repository")
    write_dense(source, torch.nn.Linear(32, 8), activation="activation.Softplus")
    with pytest.raises(ExportError, match="Softplus"):
        exported(source, tmp_path / "repository")
    with pytest.raises(ExportError, match="int4"):
        exported(source, tmp_path / "repository", precision="int4")
    (source / "modules.json").unlink()
    write_pooling(source, pooling_mode_max_tokens=True)
    with pytest.raises(ExportError, match="max"):
        exported(source, tmp_path / "repository")
    (source / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"tokenizer\.json"):
        exported(source, tmp_path / "repository")
    assert not [*(tmp_path / "repository").glob("m*")]
    (tmp_path / "repository" / "m_tokenizer").mkdir(parents=True)
    with pytest.raises(ExportError, match="exists"):
        exported(source, tmp_path / "repository")


def test_a_flag_of_text_models_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "bert")
    flags = ["--model-repository", str(tmp_path / "repository"), "--kv-cache", "int8"]
    assert invoke(["export", str(source), *flags]).exit_code == 1
    assert not (tmp_path / "repository").exists()
