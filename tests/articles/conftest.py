"""The repository of the articles, complete with small networks, on one live server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import serialize_byte_tensor

from tests.articles.networks import save_sentiment, save_tokenizer
from tests.backends.networks import (
    BLOOM_VOCABULARY,
    bloom_onnx,
    chat_torchscript,
    sentence_vectors_onnx,
    two_outputs_torchscript,
)
from tests.support.live_server import LiveServer

MODELS = Path(__file__).parent / "models"


@pytest.fixture(scope="session")
def articles_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("articles") / "models"
    shutil.copytree(MODELS, root, ignore=shutil.ignore_patterns("shansou_rank", "__pycache__"))
    for name, save in {
        "ibuddha_chitchat/1/model.pt": chat_torchscript,
        "fc_model_pt/1/model.pt": two_outputs_torchscript,
        "sps_sbert_onnx/1/model.onnx": sentence_vectors_onnx,
        "bloom_3b/1/model.onnx": bloom_onnx,
        "bloom_3b_tokenizer/1": save_tokenizer,
        "sentiment/1/sentiment": save_sentiment,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path)
    labels = "\n".join(f"token{index}" for index in range(BLOOM_VOCABULARY))
    (root / "bloom_3b" / "label.txt").write_text(labels + "\n")
    _write_warmup(root / "sentiment" / "warmup" / "raw_data")
    return root


@pytest.fixture(scope="session")
def server(articles_repository: Path) -> Iterator[LiveServer]:
    with LiveServer(articles_repository) as server:
        yield server


def _write_warmup(path: Path) -> None:
    path.parent.mkdir()
    serialized = serialize_byte_tensor(np.array(["我爱你美丽的中国".encode()], dtype=object))
    with path.open("wb") as fh:
        fh.write(serialized.item())
