"""Networks: small random ones in place of the weights of the Triton examples, which are not published.

    python -m examples.networks     # from the root of a clone, in the environment that `make setup` makes
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tritonclient.utils import serialize_byte_tensor

from tests.backends.networks import (
    BLOOM_VOCABULARY,
    bloom_onnx,
    chat_torchscript,
    ranker_saved_model,
    sentence_vectors_onnx,
    two_outputs_torchscript,
)

EXAMPLES = Path(__file__).parent

WORDS = ["[PAD]", "[UNK]", *"我爱你美丽的中国好坏房间", "hello", "world", "triton", "bloom"]


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split(" ", "removed")]
    )
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)


def save_sentiment(folder: Path) -> None:
    # Here, since it takes seconds to import.
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    save_tokenizer(folder)


def save_labels(path: Path) -> None:
    path.write_text("".join(f"token{index}\n" for index in range(BLOOM_VOCABULARY)), encoding="utf-8")


def save_warmup(path: Path) -> None:
    """The data of a warm-up request, as Triton's client serializes texts."""
    texts = np.array(["我爱你美丽的中国".encode()], dtype=object)
    path.write_bytes(serialize_byte_tensor(texts).item())


# What is missing in the folders of the examples.
NETWORKS = {
    "triton_chat/models/ibuddha_chitchat/1/model.pt": chat_torchscript,
    "triton_search/models/sps_sbert_onnx/1/model.onnx": sentence_vectors_onnx,
    "triton_sentiment/models/sentiment/1/sentiment": save_sentiment,
    "triton_sentiment/models/sentiment/warmup/raw_data": save_warmup,
    "triton_bloom/models/bloom_3b/1/model.onnx": bloom_onnx,
    "triton_bloom/models/bloom_3b/label.txt": save_labels,
    "triton_bloom/models/bloom_3b_tokenizer/1": save_tokenizer,
    "triton_custom_model/models/fc_model_pt/1/model.pt": two_outputs_torchscript,
}
if find_spec("tensorflow"):
    NETWORKS["triton_search/models/shansou_rank/1/model.savedmodel"] = ranker_saved_model


def write_networks(examples: Path) -> None:
    """Write all of them into a folder with the examples."""
    for name, save in NETWORKS.items():
        path = examples / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path)


if __name__ == "__main__":
    write_networks(EXAMPLES)
