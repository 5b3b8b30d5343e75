"""Small stand-ins for the networks of the articles, with the inputs and outputs that they had."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

CHAT_VOCABULARY = 13088
BLOOM_VOCABULARY = 250880
WORDS = ["[PAD]", "[UNK]", *"我爱你美丽的中国好坏房间", "hello", "world", "triton", "bloom"]


class ChatModel(nn.Module):
    """Three inputs, and the scores of the next token after the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHAT_VOCABULARY, 8)
        self.head = nn.Linear(8, CHAT_VOCABULARY)

    def forward(self, input_ids, attention_mask, token_type_ids):
        hidden = self.embedding(input_ids) + self.embedding(token_type_ids)
        hidden = hidden * attention_mask.unsqueeze(-1).float()
        return self.head(hidden.mean(dim=1)) * 10


class SimpleModel(nn.Module):
    """The article's own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.fc = nn.Linear(8, 4)
        self.fc_list = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, input_ids):
        word_emb = self.embedding(input_ids)
        output1 = self.fc(word_emb)
        output2 = self.fc_list(word_emb)
        return output1, output2


def save_chat_model(path: Path) -> None:
    torch.manual_seed(0)
    # TorchScript is deprecated, and what existing repositories hold.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        torch.jit.save(torch.jit.script(ChatModel().eval()), path)


def save_simple_model(path: Path) -> None:
    torch.manual_seed(0)
    ipt = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.long)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        torch.jit.save(torch.jit.trace(SimpleModel(), ipt, strict=True), path)


def save_sentence_vectors(path: Path) -> None:
    """The mean of the embeddings of those tokens that the mask keeps, 768 numbers."""
    table = np.random.default_rng(0).standard_normal((1000, 768)).astype(np.float32)
    names = ("input_ids", "attention_mask", "token_type_ids")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"]),
        helper.make_node("Gather", ["table", "token_type_ids"], ["types"]),
        helper.make_node("Add", ["words", "types"], ["sum"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["mask3"]),
        helper.make_node("Mul", ["sum", "mask3"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "one"], ["total"], keepdims=0),
        helper.make_node("ReduceSum", ["mask", "one"], ["count"], keepdims=1),
        helper.make_node("Div", ["total", "count"], ["vector"]),
    ]
    constants = {"table": table, "last": np.array([2]), "one": np.array([1])}
    _save_onnx(path, nodes, constants, names, ("vector", ["batch", 768]))


def save_bloom(path: Path) -> None:
    generator = np.random.default_rng(0)
    constants = {
        "table": generator.standard_normal((BLOOM_VOCABULARY, 4)).astype(np.float32),
        "head": generator.standard_normal((4, BLOOM_VOCABULARY)).astype(np.float32),
        "last": np.array([2]),
    }
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["mask3"]),
        helper.make_node("Mul", ["words", "mask3"], ["kept"]),
        helper.make_node("MatMul", ["kept", "head"], ["logits"]),
    ]
    output = ("logits", ["batch", "length", BLOOM_VOCABULARY])
    _save_onnx(path, nodes, constants, ("input_ids", "attention_mask"), output)


def _save_onnx(path: Path, nodes, constants, inputs, output) -> None:
    graph = helper.make_graph(
        nodes,
        "stand_in",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in inputs],
        [helper.make_tensor_value_info(output[0], TensorProto.FLOAT, output[1])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


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
