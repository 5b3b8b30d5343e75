"""Networks: small ONNX graphs and TorchScript modules in place of those of users."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

__all__ = [
    "BLOOM_VOCABULARY",
    "CHAT_VOCABULARY",
    "SimpleModel",
    "bloom_onnx",
    "chat_torchscript",
    "save_onnx",
    "save_torchscript",
    "sentence_vectors_onnx",
    "two_outputs_torchscript",
]

CHAT_VOCABULARY = 13088
BLOOM_VOCABULARY = 250880

Tensors = Mapping[str, tuple[int, Sequence[int | str | None] | None]]


def save_onnx(path: Path, nodes, *, inputs: Tensors, outputs: Tensors, weights=None) -> Path:
    """Write a graph.

    Args:
        path: the file to write, whose folder is made.
        nodes: (operator, inputs, outputs, attributes), in order.
        inputs: the type of elements and the shape, by name.
        outputs: the same; a shape of None is left out of the file.
        weights: arrays by name.
    """
    graph = helper.make_graph(
        [helper.make_node(operator, ins, outs, **attributes) for operator, ins, outs, attributes in nodes],
        "network",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def save_torchscript(path: Path, module: nn.Module, *, example=None) -> Path:
    """Write a module: traced with an example of its inputs, or scripted without one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(module) if example is None else torch.jit.trace(module, example)
        torch.jit.save(scripted, str(path))
    return path


def sentence_vectors_onnx(path: Path, *, vocab_size: int = 1000, size: int = 768) -> Path:
    """A sentence encoder: the mean of the embeddings that the attention mask selects."""
    rng = np.random.default_rng(0)
    ids = (TensorProto.INT64, ["batch", "sequence"])
    nodes = [
        ("Gather", ["words", "input_ids"], ["word"], {}),
        ("Gather", ["segments", "token_type_ids"], ["segment"], {}),
        ("Add", ["word", "segment"], ["embedded"], {}),
        ("Cast", ["attention_mask"], ["mask"], {"to": TensorProto.FLOAT}),
        ("Unsqueeze", ["mask", "last"], ["weights"], {}),
        ("Mul", ["embedded", "weights"], ["weighted"], {}),
        ("ReduceSum", ["weighted", "middle"], ["sum"], {"keepdims": 0}),
        ("ReduceSum", ["weights", "middle"], ["count"], {"keepdims": 0}),
        ("Div", ["sum", "count"], ["vector"], {}),
    ]
    return save_onnx(
        path,
        nodes,
        inputs={"input_ids": ids, "attention_mask": ids, "token_type_ids": ids},
        outputs={"vector": (TensorProto.FLOAT, ["batch", size])},
        weights={
            "words": rng.standard_normal((vocab_size, size), dtype=np.float32),
            "segments": rng.standard_normal((2, size), dtype=np.float32),
            "last": np.array([-1]),
            "middle": np.array([1]),
        },
    )


def bloom_onnx(path: Path, *, vocab_size: int = BLOOM_VOCABULARY, size: int = 4) -> Path:
    """A causal language model without a cache: logits of every position, [batch, sequence, vocabulary]."""
    rng = np.random.default_rng(0)
    ids = (TensorProto.INT64, ["batch", "sequence"])
    nodes = [
        ("Gather", ["words", "input_ids"], ["embedded"], {}),
        ("Cast", ["attention_mask"], ["mask"], {"to": TensorProto.FLOAT}),
        ("Unsqueeze", ["mask", "last"], ["weights"], {}),
        ("Mul", ["embedded", "weights"], ["weighted"], {}),
        ("CumSum", ["weighted", "axis"], ["hidden"], {}),
        ("MatMul", ["hidden", "head"], ["logits"], {}),
    ]
    return save_onnx(
        path,
        nodes,
        inputs={"input_ids": ids, "attention_mask": ids},
        outputs={"logits": (TensorProto.FLOAT, ["batch", "sequence", vocab_size])},
        weights={
            "words": rng.standard_normal((vocab_size, size), dtype=np.float32),
            "head": rng.standard_normal((size, vocab_size), dtype=np.float32),
            "last": np.array([-1]),
            "axis": np.array(1),
        },
    )


class Chat(nn.Module):
    """A chat model that answers with the logits of the next token; its last answer leads to the next."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, size)
        self.speakers = nn.Embedding(vocab_size, size)
        self.head = nn.Linear(size, vocab_size)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        weights = attention_mask.unsqueeze(-1).to(torch.float32)
        hidden = ((self.words(input_ids) + self.speakers(token_type_ids)) * weights).sum(dim=1)
        return self.head(torch.tanh(hidden))


def chat_torchscript(path: Path, *, vocab_size: int = CHAT_VOCABULARY, size: int = 8) -> Path:
    """Three inputs [batch, sequence] of int64, one output [batch, vocabulary]: INPUT__0..2, OUTPUT__0."""
    torch.manual_seed(0)
    return save_torchscript(path, Chat(vocab_size, size).eval())


class SimpleModel(nn.Module):
    """One input, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.fc = nn.Linear(8, 4)
        self.fc_list = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, input_ids):
        word_emb = self.embedding(input_ids)
        output1 = self.fc(word_emb)
        output2 = self.fc_list(word_emb)
        return output1, output2


def two_outputs_torchscript(path: Path) -> Path:
    """[batch, sequence] of int64 to [batch, sequence, 4] and [batch, sequence, 8]: input__0, output__0..1."""
    torch.manual_seed(0)
    example = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.long)
    return save_torchscript(path, SimpleModel(), example=example)


def ranker_saved_model(path: Path) -> Path:
    """A ranker in TensorFlow: the mean of the ids that the mask selects, plus the last token's segment."""
    # Here, since it takes seconds to import.
    import tensorflow as tf

    ids = tf.TensorSpec([None, 128], tf.int32)

    class Ranker(tf.Module):
        @tf.function(input_signature=[ids, ids, ids])
        def rank(self, input_ids, input_mask, segment_ids):
            mask = tf.cast(input_mask, tf.float32)
            mean = tf.reduce_sum(tf.cast(input_ids, tf.float32) * mask, axis=1) / tf.reduce_sum(mask, axis=1)
            return {"output": (mean + tf.cast(segment_ids[:, -1], tf.float32))[:, None]}

    ranker = Ranker()
    tf.saved_model.save(ranker, str(path), signatures={"serving_default": ranker.rank})
    return path
