"""What stands in for the sentiment network of the articles and for their tokenizers."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", *"我爱你美丽的中国好坏房间", "hello", "world", "triton", "bloom"]


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split(" ", "removed")]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)


def save_sentiment(folder: Path) -> None:
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


def load_torchscript(path: Path) -> torch.jit.ScriptModule:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return torch.jit.load(path)
