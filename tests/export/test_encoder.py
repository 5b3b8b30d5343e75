"""Encoders as they are exported, asked over HTTP, against transformers and the pooling of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from genserve.errors import ExportError
from genserve.export import KNOWN_ENCODERS, SilentProgress, is_encoder, pull_encoder
from genserve.export.encoder import export_encoder
from genserve.export.pulling import cache_folder, fetch_checkpoint
from tests.support.command_line import invoke
from tests.support.live_server import LiveServer

_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "vocab_size": 60, "pad_token_id": 1,
}  # fmt: skip
_WINDOW = {"local_attention": 8}    # tokens, in every other layer of ModernBERT
TEXTS = ["a b c d e f g", "h", "i j k", "l m n o p q r s t u v w x y z a b c"]
POOLINGS = {
    "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken",
}  # fmt: skip


def checkpoint(
    folder: Path, model_type: str, *, kind: Any = AutoModel, modules: Sequence[str] = (), **config: Any
) -> Path:
    """Write a checkpoint with random weights, a tokenizer of letters, and sentence-transformers' modules."""
    torch.manual_seed(0)
    if model_type == "modernbert":
        config |= _WINDOW
    made = AutoConfig.for_model(model_type, **_SIZES, **config, num_labels=1)
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


def exported(source: Path, repository: Path) -> None:
    assert is_encoder(str(source))
    export_encoder(source, repository=repository, name="m", progress=SilentProgress())


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
    ],
)  # fmt: skip
def test_vectors_are_those_of_transformers(
    tmp_path: Path, model_type: str, pooling: str, normalizes: bool
) -> None:
    modules = ["Transformer", "Pooling", *["Normalize"] * normalizes]
    source = checkpoint(tmp_path / "source", model_type, modules=modules)
    write_pooling(source, **{key: name == pooling for name, key in POOLINGS.items()})
    exported(source, tmp_path / "repository")
    with LiveServer(tmp_path / "repository") as server:
        answer = httpx2.post(f"{server.url}/v1/embeddings", json={"model": "m", "input": TEXTS}, timeout=60)
    vectors = [item["embedding"] for item in answer.json()["data"]]
    expected = []
    for text in TEXTS:
        states = source_output(source, AutoModel, text).last_hidden_state[0].numpy()
        vector = {"mean": states.mean(axis=0), "cls": states[0], "last": states[-1]}[pooling]
        expected.append(vector / np.linalg.norm(vector) if normalizes else vector)
    np.testing.assert_allclose(vectors, np.stack(expected), atol=1e-5, rtol=0)
    parity = json.loads((tmp_path / "repository" / "m_encoder" / "1" / "parity.json").read_text())
    assert parity["largest_difference"] <= 1e-5
    assert parity["precision"] == "fp32"


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
    source = checkpoint(tmp_path / "source", "bert", modules=["Transformer", "Pooling", "Dense"])
    with pytest.raises(ExportError, match="Dense"):
        exported(source, tmp_path / "repository")
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
